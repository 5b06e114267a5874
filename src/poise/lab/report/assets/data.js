// What the page holds, unpacked (timeline.py says how it is packed), and times in words.

const unpacked = async (holder) => {
  const text = atob(holder.textContent), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
};

const column = (bytes, place, count) => {
  const found = new Int32Array(count), low = 3 * place * count, middle = low + count, high = middle + count;
  for (let i = 0; i < count; i++) found[i] = bytes[low + i] | bytes[middle + i] << 8 | bytes[high + i] << 16;
  return found;
};

// Columns of blocks; `ended` is a place in the list of ends, `lane` 0 for a whole row, 1 for its upper half, 2 for its lower.
const blocksOf = (bytes) => {
  const count = bytes.length / 18;
  const [start, end, row, rows, job, ended] = [0, 1, 2, 3, 4, 5].map((place) => column(bytes, place, count));
  for (let i = 0, now = 0; i < count; i++) {
    start[i] = now += start[i];
    end[i] += start[i];
  }
  return { count, start, end, row, rows, job, ended: ended.map((each) => each & 7), lane: ended.map((each) => each >> 3) };
};

const two = (value) => String(value).padStart(2, "0");

// A moment or a duration to the second, 3d 04:05:06; to hundredths where the whole is short.
const clock = (seconds, whole) => {
  if (whole < 100) return `${Math.round(seconds * 100) / 100} s`;
  const all = Math.round(seconds), days = Math.floor(all / 86400), hours = Math.floor(all / 3600) % 24;
  const time = `${two(Math.floor(all / 60) % 60)}:${two(all % 60)}`;
  return days ? `${days}d ${two(hours)}:${time}` : `${hours}:${time}`;
};

const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

// The least round number of seconds that is no less: of the clock, or 1, 2 or 5 times a power of ten of seconds or days.
const roundStep = (least) => {
  if (least > 1 && least <= 86400) return STEPS.find((step) => step >= least);
  const day = least > 86400 ? 86400 : 1, power = 10 ** Math.floor(Math.log10(least / day));
  return day * power * [1, 2, 5, 10].find((digit) => digit * power * day >= least * (1 - 1e-9));
};

const tickText = (seconds, step) => {
  if (seconds === 0) return "0";
  if (step < 1) return `${+seconds.toFixed(6)} s`;
  if (step >= 86400) return `${Math.round(seconds / 86400).toLocaleString("en")} d`;
  if (step >= 3600 && seconds < 259200) return `${Math.round(seconds / 3600)} h`;
  return clock(seconds, Infinity).slice(0, step < 60 ? undefined : -3);
};
