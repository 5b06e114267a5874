// A GPU timeline that people can handle: which run, which part of it, coloured by what, and whose a block is.

const SIZES = [[1, "1 GPU"], [4, "2–4 GPUs"], [8, "5–8 GPUs"], [Infinity, "more than 8 GPUs"]];
const NOTE = "At the end of a block: × failed or lost its node, ‖ preempted, ○ cancelled, ▸ still under way; no mark: finished, or its task is computed.";
const DEEDS = {
  in: (view) => view.nearer(2), out: (view) => view.nearer(0.5),
  left: (view) => view.shifted(-0.25, 0), right: (view) => view.shifted(0.25, 0),
  up: (view) => view.shifted(0, -0.25), down: (view) => view.shifted(0, 0.25),
  fewer: (view) => view.nearer(1, 0.5, 2), more: (view) => view.nearer(1, 0.5, 0.5),
  start: (view) => view.shifted(-1e9, 0), end: (view) => view.shifted(1e9, 0), whole: (view) => view.whole(),
};
const KEYS = {
  "+": "in", "=": "in", "-": "out", "−": "out", _: "out", 0: "whole", Home: "start", End: "end",
  ArrowLeft: "left", ArrowRight: "right", ArrowUp: "up", ArrowDown: "down", "Shift ArrowUp": "fewer", "Shift ArrowDown": "more",
};

const made = (tag, text, more = {}) => Object.assign(document.createElement(tag), { textContent: text }, more);

const swatch = (look, group) => {
  const square = made("canvas", "", { className: "swatch", width: 26, height: 26 }), pen = square.getContext("2d");
  for (const style of [`rgb(${look.groups[group]})`, look.textures[group]]) {
    if (!style) continue;
    pen.fillStyle = style;
    pen.fillRect(0, 0, 26, 26);
  }
  return square;
};

// Of `common`: what follows from what stands there.
const completed = (common) => {
  const { jobs, tenant, nodes, span, units } = common;
  return Object.assign(common, {
    unit: span / units,
    total: nodes.reduce((sum, [, count]) => sum + count, 0),
    gpuAt: (row) => {
      let slot = row, place = 0;
      while (slot >= nodes[place][1]) slot -= nodes[place++][1];
      return { name: `${nodes[place][0]}:${slot}`, type: nodes[place][2] };
    },
    nameOf: (job) => job < jobs.length ? jobs[job] : "several jobs",
    tenantOf: (job) => job < jobs.length ? tenant[job] : job - jobs.length,
  });
};

// What blocks can be coloured by: a name for each group, and the group of a block of a job with an end. The last colour is grey.
const groupingsOf = ({ tenants, jobs, gpus, ends, colours, tenantOf }) => {
  const others = tenants.length > colours ? [`${tenants.length - colours} other tenants`] : [];
  const all = {
    tenant: { names: [...tenants.slice(0, colours), ...others], of: (job) => Math.min(colours, tenantOf(job)) },
    job: { names: [], of: (job) => job < jobs.length ? job % colours : colours },
    "GPUs asked for": {
      names: SIZES.map(([, name]) => name),
      of: (job) => job < jobs.length ? SIZES.findIndex(([most]) => gpus[job] <= most) : colours,
    },
    "how it ended": { names: ends, of: (job, ended) => Math.min(ended, colours) },
  };
  if (tenants.length < 2) delete all.tenant;
  return all;
};

class Timeline {
  constructor(root, common, runs) {
    const find = (selector) => root.querySelector(selector);
    Object.assign(this, { root, common, runs, find, known: new Map(), stage: find(".stage"), tip: find(".tip"), frame: find(".part") });
    this.names = [...root.querySelectorAll(".runs span")].map((each) => each.textContent);
    this.picture = new Picture(find("canvas"), common);
    this.view = new View(common.units, common.total);
    this.groupings = groupingsOf(common);
    this.grouping = Object.values(this.groupings)[0];
    Object.assign(this, { only: null, pointed: null, asked: false, onPaper: false, blocks: null, fingers: new Map(), drag: null, armed: true });
  }

  async show(run) {
    this.run = run;
    if (!this.known.has(run)) this.known.set(run, unpacked(this.runs[run]).then(blocksOf));
    const blocks = await this.known.get(run);
    if (this.run !== run) return;  // another was chosen meanwhile
    this.point(null);
    this.blocks = blocks;
    this.sort();
    this.draw();
  }

  // The group of each block.
  sort() {
    const { blocks, grouping } = this;
    this.groups = new Uint8Array(blocks ? blocks.count : 0).map((_, i) => grouping.of(blocks.job[i], blocks.ended[i]));
  }

  ask() {
    if (!this.asked) requestAnimationFrame(() => this.draw());
    this.asked = true;
  }

  draw() {
    this.asked = false;
    if (!this.blocks) return;
    this.picture.measure(Math.max(200, this.stage.clientWidth), this.onPaper ? 2 : 1);
    this.picture.draw(this.blocks, this.groups, this.only, this.view, this.look);
    if (this.pointed !== null) this.picture.point(this.pointed);
    this.say();
  }

  learnColours() { this.look = lookOf(this.root, this.common.colours, this.onPaper || MEDIA.some((media) => media.matches && media !== DARK)); }

  say() {
    const { view, common: { unit, span, total } } = this, first = Math.floor(view.top) + 1, last = Math.ceil(view.bottom);
    const time = `${clock(view.from * unit, span)} to ${clock(view.to * unit, span)} of ${clock(span, span)}`, all = total.toLocaleString("en");
    const rows = last - first + 1 === total ? (total > 1 ? `all ${all} GPUs` : "the only GPU") : `GPUs ${first.toLocaleString("en")} to ${last.toLocaleString("en")} of ${all}`;
    this.find(".shown").textContent = `${this.names[this.run]}: ${time}, ${rows}`;
    Object.assign(this.root.dataset, { from: view.from * unit, to: view.to * unit, top: view.top, bottom: view.bottom, run: this.names[this.run] });
    for (const button of this.root.querySelectorAll("[data-do]")) button.disabled = !view.differs(DEEDS[button.dataset.do](view));
  }

  // Shows another part; says whether it is another.
  go(view) {
    const moved = view.differs(this.view);
    this.view = view;
    if (moved) {
      this.point(null);
      this.ask();
    }
    return moved;
  }

  told(i) {
    const { blocks, common } = this, { unit, span, gpus, jobs } = common, job = blocks.job[i], row = blocks.row[i], rows = blocks.rows[i];
    const asked = job < jobs.length ? `, ${gpus[job]} GPU${gpus[job] === 1 ? "" : "s"} asked for` : "", [first, last] = [row, row + rows - 1].map(common.gpuAt);
    const where = rows === 1 ? first.name : `${rows} GPUs, ${first.name} to ${last.name}`, types = new Set([first.type, last.type]);
    return [
      common.nameOf(job),
      `tenant ${common.tenants[common.tenantOf(job)]}${asked}`,
      `${where}, ${[...types].join(" to ")}${blocks.lane[i] ? ", shared with another job" : ""}`,
      `${clock(blocks.start[i] * unit, span)} to ${clock(blocks.end[i] * unit, span)}, ${clock((blocks.end[i] - blocks.start[i]) * unit, span)} long`,
      common.ends[blocks.ended[i]],
    ];
  }

  // Says whose a block is, beside a point; null for none.
  point(block, { x, y } = {}) {
    const moved = block !== this.pointed, { tip, picture } = this;
    this.pointed = block;
    tip.hidden = block === null;
    if (block !== null) {
      if (moved) tip.replaceChildren(...this.told(block).map((text) => made("div", text)));
      const beyond = x + 14 + tip.offsetWidth > picture.left + picture.width;
      tip.style.left = `${Math.max(0, beyond ? x - 14 - tip.offsetWidth : x + 14)}px`;
      tip.style.top = `${Math.max(0, Math.min(y + 14, picture.height + AXIS - tip.offsetHeight))}px`;
    }
    if (moved && this.blocks && !this.asked) picture.point(block);
  }

  pointAt(at) { this.point(this.picture.holds(at) ? this.picture.blockAt(at.x, at.y) : null, at); }

  // ---- fingers, mice, wheels, keys

  place(event) {
    const { left, top } = this.picture.canvas.getBoundingClientRect();
    return { x: event.clientX - left, y: event.clientY - top };
  }

  press(event) {
    const at = this.place(event);
    if (event.button || !this.picture.holds(at)) return;
    this.stage.setPointerCapture(event.pointerId);
    this.fingers.set(event.pointerId, at);
    this.drag = { from: at, touch: event.pointerType === "touch", moves: event.pointerType === "touch" || event.shiftKey, far: false };
  }

  move(event) {
    const at = this.place(event), before = this.fingers.get(event.pointerId);
    if (!this.blocks) return;
    if (!before) this.pointAt(at);
    else if (this.fingers.size === 2) this.pinch(event.pointerId, before, at);
    else if (this.drag) this.pull(before, at);
    if (before) this.fingers.set(event.pointerId, at);
  }

  pull(before, at) {
    const { drag, picture } = this;
    drag.far ||= Math.hypot(at.x - drag.from.x, at.y - drag.from.y) > 4;
    if (!drag.far) return;
    if (drag.moves) this.go(this.view.shifted((before.x - at.x) / picture.width, drag.touch ? 0 : (before.y - at.y) / picture.height));
    else this.select(at);
  }

  pinch(finger, before, at) {
    const other = [...this.fingers].find(([id]) => id !== finger)[1];
    const apart = (one, side) => Math.max(24, Math.abs(one[side] - other[side])), grown = (side) => apart(at, side) / apart(before, side);
    const [x, y] = this.picture.fraction({ x: (at.x + other.x) / 2, y: (at.y + other.y) / 2 });
    this.drag = null;
    this.go(this.view.nearer(grown("x"), x, grown("y"), y));
  }

  // The two corners of what is selected, as fractions of what is shown; nearly flat means all rows.
  corners(at) {
    const one = this.picture.fraction(this.drag.from), other = this.picture.fraction(at);
    return Math.abs(at.y - this.drag.from.y) < 12 ? [[one[0], 0], [other[0], 1]] : [one, other];
  }

  select(at) {
    const { left, width, height } = this.picture, [[x0, y0], [x1, y1]] = this.corners(at);
    this.point(null);
    this.frame.hidden = false;
    Object.assign(this.frame.style, {
      left: `${left + Math.min(x0, x1) * width}px`, width: `${Math.abs(x1 - x0) * width}px`,
      top: `${Math.min(y0, y1) * height}px`, height: `${Math.abs(y1 - y0) * height}px`,
    });
  }

  release(event) {
    const at = this.place(event), { drag } = this;
    this.fingers.delete(event.pointerId);
    this.frame.hidden = true;
    if (drag && event.type === "pointerup") {
      if (!drag.far) this.pointAt(at);
      else if (!drag.moves) this.go(this.view.part(...this.corners(at)));
    }
    this.drag = null;
  }

  // A wheel that scrolls the page goes on scrolling it when the timeline comes under the pointer: it zooms once the pointer moves here.
  wheel(event) {
    const at = this.place(event);
    if (!this.armed || !this.blocks || !this.picture.holds(at)) return;
    const [x, y] = this.picture.fraction(at), pixels = event.deltaMode === 0 ? 1 : 33;
    const closer = Math.exp(-event.deltaY * pixels * (event.ctrlKey ? 0.01 : 0.002)), sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const view = event.shiftKey || sideways
      ? this.view.shifted((event.deltaX || event.deltaY) * pixels / this.picture.width, 0)
      : this.view.nearer(closer, x, event.ctrlKey ? closer : 1, y);
    if (this.go(view) || event.ctrlKey) event.preventDefault();
  }

  arm({ screenX, screenY }) {
    this.armed ||= screenX !== this.seen?.screenX || screenY !== this.seen?.screenY;
    this.seen = { screenX, screenY };
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") this.point(null);
    const arrow = event.key.startsWith("Arrow"), deed = DEEDS[KEYS[event.shiftKey && arrow ? `Shift ${event.key}` : event.key]];
    if (deed && (this.go(deed(this.view)) || !arrow)) event.preventDefault();
  }

  // ---- choices

  choose(grouping) {
    this.grouping = grouping;
    const entries = grouping.names.map((name, group) => {
      const button = made("button", name, { type: "button", title: name });
      button.prepend(swatch(this.look, group));
      button.addEventListener("click", () => this.isolate(this.only === group ? null : group));
      return button;
    });
    const note = entries.length ? NOTE : `Jobs that were submitted one after another differ in colour. ${NOTE}`;
    this.find(".key").replaceChildren(...entries, made("span", note));
    this.sort();
    this.isolate(null);
  }

  // Shows one group in its colour and all others faintly; null for all in theirs.
  isolate(group) {
    this.only = group;
    this.find(".key").querySelectorAll("button").forEach((button, place) => button.setAttribute("aria-pressed", String(place === group)));
    this.ask();
  }

  redo() {
    this.learnColours();
    this.find(".key").querySelectorAll(".swatch").forEach((old, group) => old.replaceWith(swatch(this.look, group)));
    this.draw();
  }

  listen() {
    const { stage, root } = this, on = (name, heard, options) => stage.addEventListener(name, heard, options);
    on("pointerdown", (event) => this.press(event));
    on("pointermove", (event) => { this.arm(event); this.move(event); });
    for (const name of ["pointerup", "pointercancel"]) on(name, (event) => this.release(event));
    on("pointerleave", (event) => { if (event.pointerType !== "touch") this.point(null); });
    on("dblclick", (event) => this.go(this.view.nearer(4, this.picture.fraction(this.place(event))[0])));
    on("wheel", (event) => this.wheel(event), { passive: false });
    on("keydown", (event) => this.key(event));
    addEventListener("wheel", (event) => { this.armed &&= stage.contains(event.target); }, { passive: true });
    for (const button of root.querySelectorAll("[data-do]")) button.addEventListener("click", () => this.go(DEEDS[button.dataset.do](this.view)));
    for (const radio of root.querySelectorAll(".runs input")) radio.addEventListener("change", () => this.show(Number(radio.value)));
    for (const media of MEDIA) media.addEventListener("change", () => this.redo());
    addEventListener("beforeprint", () => { this.onPaper = true; this.redo(); });
    addEventListener("afterprint", () => { this.onPaper = false; this.redo(); });
    new ResizeObserver(() => this.ask()).observe(stage);
  }

  async begin() {
    const select = this.find("select");
    select.append(...Object.keys(this.groupings).map((name) => new Option(name, name)));
    select.addEventListener("change", () => this.choose(this.groupings[select.value]));
    this.find(".runs").hidden = this.runs.length < 2;
    this.find(".live").hidden = false;
    this.learnColours();
    this.choose(this.grouping);
    await this.show(Number(this.find(".runs input:checked").value));
    this.listen();
  }
}

const DARK = matchMedia("(prefers-color-scheme: dark)");
const MEDIA = [matchMedia("print"), matchMedia("(prefers-contrast: more)"), DARK];

document.querySelectorAll(".timeline").forEach(async (root, place) => {
  for (const radio of root.querySelectorAll(".runs input")) radio.name = `run-${place}`;
  const [first, ...runs] = root.querySelectorAll("script[data-holds]");
  try {
    await new Timeline(root, completed(JSON.parse(new TextDecoder().decode(await unpacked(first)))), runs).begin();
    root.dataset.ready = "yes";
    performance.mark("timeline drawn");
  } catch (error) {  // a browser too old for this sees what those without scripts see
    root.querySelector(".live").hidden = true;
    root.insertAdjacentHTML("beforeend", root.querySelector("noscript").textContent);
    console.warn("timeline:", error);
  }
});
