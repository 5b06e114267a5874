// A run on a canvas.

const AXIS = 24;  // CSS pixels below the rows, for the ticks of time
const MARKS = { failed: "×", "node lost": "×", preempted: "‖", "trial over": "‖", cancelled: "○", "still under way": "▸" };

// A block onto pixels, each by the area of it that the block covers: many blocks in one pixel give their mean.
const fill = (sums, width, x0, x1, y0, y1, colour) => {
  const red = colour[0], green = colour[1], blue = colour[2];
  for (let y = Math.floor(y0); y < y1; y++) {
    const tall = Math.min(y + 1, y1) - Math.max(y, y0);
    for (let x = Math.floor(x0), at = 4 * (y * width + x); x < x1; x++, at += 4) {
      const part = tall * (Math.min(x + 1, x1) - Math.max(x, x0));
      sums[at] += red * part;
      sums[at + 1] += green * part;
      sums[at + 2] += blue * part;
      sums[at + 3] += part;
    }
  }
};

const develop = (sums, image) => {
  for (let at = 0; at < sums.length; at += 4) {
    const part = sums[at + 3];
    if (part === 0) continue;
    image.data[at] = sums[at] / part;
    image.data[at + 1] = sums[at + 1] / part;
    image.data[at + 2] = sums[at + 2] / part;
    image.data[at + 3] = 255 * Math.min(1, part);
  }
};

const rgb = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
const isBright = ([red, green, blue]) => 0.3 * red + 0.59 * green + 0.11 * blue > 125;

// Strokes in a square of 8 that tell colours apart where they print in grey; the first colour has none.
const STROKES = [
  [], ["M0 8L8 0M-2 2L2 -2M6 10L10 6"], ["M4 0V8"], ["M0 4H8"], ["M3 4H5M4 3V5"], ["M0 0L8 8M-2 6L2 10M6 -2L10 2"], ["M4 0V8M0 4H8"],
  ["M2 0V8M6 0V8"], ["M0 2H8M0 6H8"], ["M1 2H3M5 6H7"], ["M0 8L8 0M-2 2L2 -2M6 10L10 6M0 0L8 8M-2 6L2 10M6 -2L10 2"],
];

const texture = (strokes, paper) => {
  const square = document.createElement("canvas"), pen = square.getContext("2d");
  square.width = square.height = 8;
  Object.assign(pen, { strokeStyle: paper, globalAlpha: 0.7, lineWidth: 1.6 });
  for (const path of strokes) pen.stroke(new Path2D(path));
  return pen.createPattern(square, "repeat");
};

// Colours of groups and of the rest, as the style sheet has them now.
const lookOf = (root, colours, textured) => {
  const style = getComputedStyle(root), value = (name) => style.getPropertyValue(`--${name}`).trim();
  const groups = Array.from({ length: colours }, (_, place) => rgb(value(`s${place}`)));
  return {
    ...Object.fromEntries(["ink", "muted", "rule", "wash", "paper"].map((name) => [name, value(name)])),
    groups: [...groups, rgb(value("quiet"))],
    faint: rgb(value("grid")),
    font: `11px ${style.fontFamily}`,
    textures: textured ? STROKES.map((strokes) => texture(strokes, value("paper"))) : [],
  };
};

class Picture {
  constructor(canvas, common) {
    Object.assign(this, { canvas, common, pen: canvas.getContext("2d"), sums: new Float32Array(0), spot: new Float64Array(4) });
    this.drawn = document.createElement("canvas");  // without what is pointed at
  }

  // Where rows and times are drawn, in CSS pixels; names of nodes stand to the left.
  measure(width, sharpest) {
    const { nodes, total } = this.common, longest = nodes.reduce((most, [name]) => Math.max(most, name.length), 3);
    this.left = Math.round(Math.min(longest * 7 + 10, width * 0.2, 120));
    this.width = width - this.left;
    this.height = within(total * 14, 120, 430);
    this.ratio = within(devicePixelRatio || 1, sharpest, 3);
    const wide = Math.round(width * this.ratio), high = Math.round((this.height + AXIS) * this.ratio);
    if (this.canvas.width !== wide || this.canvas.height !== high) Object.assign(this.canvas, { width: wide, height: high });
  }

  // blocks, the group of each, and the group to show alone, or null
  draw(blocks, groups, only, view, look) {
    Object.assign(this, { blocks, groups, only, view, look });
    const { pen } = this;
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    const large = this.paint();
    pen.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    pen.globalCompositeOperation = "destination-over";  // beneath the blocks
    this.ruleRows();
    pen.fillStyle = look.wash;
    pen.fillRect(this.left, 0, this.width, this.height);
    pen.globalCompositeOperation = "source-over";
    pen.font = look.font;
    for (const each of large) this.label(...each);
    this.labelRows();
    this.labelTime();
    Object.assign(this.drawn, { width: this.canvas.width, height: this.canvas.height });
    this.drawn.getContext("2d").drawImage(this.canvas, 0, 0);
  }

  across(time) { return this.left + (time - this.view.from) / this.view.wide * this.width; }
  down(row) { return (row - this.view.top) / this.view.high * this.height; }

  // Puts into `spot` where a block is drawn (x0, x1, y0, y1), with a gap to its neighbours if there is room for one;
  // says whether it is in sight. It makes nothing new: it is asked of every block in every frame.
  locate(i) {
    const { blocks, view, spot } = this, rows = blocks.rows[i], below = blocks.row[i] + rows;
    if (blocks.end[i] <= view.from || blocks.start[i] >= view.to || below <= view.top || blocks.row[i] >= view.bottom) return false;
    let x0 = this.across(blocks.start[i]), x1 = this.across(blocks.end[i]), y0 = this.down(blocks.row[i]), y1 = this.down(below);
    if (blocks.lane[i] === 1) y1 = (y0 + y1) / 2;
    if (blocks.lane[i] === 2) y0 = (y0 + y1) / 2;
    if (x1 - x0 > 3) x1 -= 1;
    if (y1 - y0 > 3 * rows) y1 -= 1;
    spot[0] = Math.max(x0, this.left);
    spot[1] = Math.min(x1, this.left + this.width);
    spot[2] = Math.max(y0, 0);
    spot[3] = Math.min(y1, this.height);
    return spot[0] < spot[1] && spot[2] < spot[3];
  }

  // All blocks in colour; returns those that are large enough for words.
  paint() {
    const { left, ratio, look, blocks, groups, only, spot } = this, wide = Math.ceil(this.width * ratio), high = Math.ceil(this.height * ratio);
    if (this.sums.length === 4 * wide * high) this.sums.fill(0);
    else this.sums = new Float32Array(4 * wide * high);
    const large = [];
    for (let i = 0; i < blocks.count; i++) {
      if (!this.locate(i)) continue;
      const shown = only === null || only === groups[i], colour = shown ? look.groups[groups[i]] : look.faint;
      fill(this.sums, wide, (spot[0] - left) * ratio, (spot[1] - left) * ratio, spot[2] * ratio, spot[3] * ratio, colour);
      if (shown && spot[1] - spot[0] >= 8 && spot[3] - spot[2] >= 4) large.push([i, groups[i], ...spot]);
    }
    const image = this.pen.createImageData(wide, high);
    develop(this.sums, image);
    this.pen.putImageData(image, Math.round(left * ratio), 0);
    return large;
  }

  label(i, group, x0, x1, y0, y1) {
    const { pen, look, common, blocks } = this;
    if (look.textures[group]) {
      pen.fillStyle = look.textures[group];
      pen.fillRect(x0, y0, x1 - x0, y1 - y0);
    }
    if (y1 - y0 < 9) return;
    const mark = MARKS[common.ends[blocks.ended[i]]], middle = (y0 + y1) / 2 + 0.5, name = common.nameOf(blocks.job[i]);
    Object.assign(pen, { fillStyle: isBright(look.groups[group]) ? "#000" : "#fff", textBaseline: "middle", textAlign: "right" });
    if (mark && x1 - x0 >= 12 && this.across(blocks.end[i]) <= x1 + 2) pen.fillText(mark, x1 - 2, middle);
    pen.textAlign = "left";
    if (!look.textures.length && name.length * 6.2 <= x1 - x0 - (mark ? 18 : 8)) pen.fillText(name, x0 + 4, middle, x1 - x0 - 8);
  }

  rule(colour, x0, y0, x1, y1) {
    this.pen.strokeStyle = colour;
    this.pen.stroke(new Path2D(`M${x0} ${y0}L${x1} ${y1}`));
  }

  // What nodes there are in sight, with their first rows.
  *nodes() {
    const { view, common: { nodes } } = this;
    for (let place = 0, row = 0; place < nodes.length && row < view.bottom; row += nodes[place++][1]) {
      const [name, count, type] = nodes[place];
      if (row + count > view.top) yield { name, count, row, y: this.down(row), other: place > 0 && nodes[place - 1][2] !== type };
    }
  }

  // Lines between nodes, if they are not too many, and between types.
  ruleRows() {
    for (const { count, y, other } of this.nodes()) {
      if (y > 0 && other) this.rule(this.look.muted, 0, y - 0.5, this.left + this.width, y - 0.5);
      else if (y > 0 && count * this.height / this.view.high >= 7) this.rule(this.look.rule, this.left, y - 0.5, this.left + this.width, y - 0.5);
    }
  }

  // Names of nodes, as many as there is room for, and slots where there is room for them too.
  labelRows() {
    const { pen, look } = this, each = this.height / this.view.high, most = Math.floor((this.left - 8) / 6.4);
    Object.assign(pen, { fillStyle: look.muted, textAlign: "right", textBaseline: "top" });
    let free = 0;
    const write = (text, y) => {
      if (y < free || y + 12 > this.height) return;
      pen.fillText(text.length > most ? text.slice(0, most - 1) + "…" : text, this.left - 5, y + 1);
      free = y + 13;
    };
    for (const { name, count, row, y } of this.nodes()) {
      write(name, Math.max(y, 0));
      for (let slot = 1; each >= 13 && slot < count; slot++) write(`:${slot}`, this.down(row + slot));
    }
  }

  labelTime() {
    const { pen, view, look, common: { unit } } = this, right = this.left + this.width;
    const step = roundStep(view.wide * unit / Math.max(2, Math.floor(this.width / 70)));
    Object.assign(pen, { fillStyle: look.muted, textAlign: "center", textBaseline: "top" });
    this.rule(look.rule, this.left, this.height + 0.5, right, this.height + 0.5);
    for (let count = Math.ceil(view.from * unit / step - 1e-9); count * step <= view.to * unit * (1 + 1e-12); count++) {
      const x = this.across(count * step / unit), text = tickText(count * step, step), half = pen.measureText(text).width / 2;
      this.rule(look.rule, x, this.height, x, this.height + 5);
      pen.fillText(text, within(x, half, right - half), this.height + 8);
    }
  }

  // A line around all blocks of the job that is pointed at; null for none.
  point(pointed) {
    const { pen, blocks, spot, common: { jobs } } = this;
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    pen.drawImage(this.drawn, 0, 0);
    if (pointed === null) return;
    pen.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    Object.assign(pen, { strokeStyle: this.look.ink, lineWidth: 1.5 });
    for (let i = 0; i < blocks.count; i++) {
      const same = i === pointed || (blocks.job[i] === blocks.job[pointed] && blocks.job[i] < jobs.length);
      if (same && this.locate(i)) pen.strokeRect(spot[0], spot[2], Math.max(1, spot[1] - spot[0]), Math.max(1, spot[3] - spot[2]));
    }
    pen.lineWidth = 1;
  }

  // The block at a point, or the nearest within a pixel of it in time, so that short ones can be met; null if there is none.
  blockAt(x, y) {
    const { view, blocks } = this, slack = view.wide / this.width;
    const time = view.from + (x - this.left) * slack, row = view.top + y / this.height * view.high;
    let found = null;
    for (let i = 0; i < blocks.count; i++) {
      const into = row - blocks.row[i], lane = blocks.lane[i];
      if (blocks.start[i] > time + slack || blocks.end[i] < time - slack || into < 0 || into >= blocks.rows[i]) continue;
      if (lane && (lane === 1) !== (into < blocks.rows[i] / 2)) continue;
      if (blocks.start[i] <= time && time < blocks.end[i]) return i;
      found = i;
    }
    return found;
  }

  holds({ x, y }) { return x >= this.left && x <= this.left + this.width && y >= 0 && y <= this.height; }
  fraction({ x, y }) { return [within((x - this.left) / this.width, 0, 1), within(y / this.height, 0, 1)]; }
}
