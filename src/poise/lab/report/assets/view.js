// What part of the whole is shown: times in units, rows from the top. A view does not change; moving about gives another.

const DEEPEST = 4096;  // how many times the whole is longer than the shortest time that can be shown
const FEWEST_ROWS = 4;

const within = (value, low, high) => Math.min(Math.max(value, low), high);

class View {
  constructor(units, total, from = 0, to = units, top = 0, bottom = total) {
    Object.assign(this, { units, total, from, to, top, bottom });
  }

  get wide() { return this.to - this.from; }
  get high() { return this.bottom - this.top; }

  at(from, wide, top, high) {
    const left = within(from, 0, this.units - wide), above = within(top, 0, this.total - high);
    return new View(this.units, this.total, left, left + wide, above, above + high);
  }

  whole() { return new View(this.units, this.total); }

  // Closer by a factor in time and in rows, around a point that stays where it is: 0 is the left or upper end, 1 the other.
  nearer(closer, x = 0.5, rowsCloser = 1, y = 0.5) {
    const wide = within(this.wide / closer, this.units / DEEPEST, this.units);
    const high = within(this.high / rowsCloser, Math.min(FEWEST_ROWS, this.total), this.total);
    return this.at(this.from + x * (this.wide - wide), wide, this.top + y * (this.high - high), high);
  }

  // The part between two fractions of what is shown; of rows, all that are shown if the two are the same.
  part([x0, y0], [x1, y1]) {
    const across = Math.max(Math.abs(x1 - x0), 1e-9), down = Math.abs(y1 - y0) || 1;
    const stays = (low, size) => size < 1 ? low / (1 - size) : 0.5;
    return this.nearer(1 / across, stays(Math.min(x0, x1), across), 1 / down, down < 1 ? stays(Math.min(y0, y1), down) : 0.5);
  }

  // Later and further down, by fractions of what is shown.
  shifted(times, rows) { return this.at(this.from + times * this.wide, this.wide, this.top + rows * this.high, this.high); }

  differs(other) {
    const apart = (one, two, whole) => Math.abs(one - two) > 1e-9 * whole;
    return apart(this.from, other.from, this.units) || apart(this.to, other.to, this.units) ||
      apart(this.top, other.top, this.total) || apart(this.bottom, other.bottom, this.total);
  }
}
