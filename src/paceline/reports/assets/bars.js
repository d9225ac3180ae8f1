// Bar charts: a histogram, one bar per class, or one dot per run and class.

class Histogram extends Figure {
  draw(spec, width, height) {
    const box = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom };
    const most = Math.max(...spec.bars.map(([, , count]) => count), 1);
    const total = spec.bars.reduce((sum, [, , count]) => sum + count, 0) || 1;
    const unit = unitOf("count", most);
    const grid = svg("g", { class: "axis" });
    for (const value of ticks(0, (1.05 * most) / unit.size, 4)) {
      const at = box.bottom - ((value * unit.size) / (1.05 * most)) * (box.bottom - box.top);
      grid.append(svg("line", { class: "grid", x1: box.left, x2: box.right, y1: at, y2: at }),
        svg("text", { x: box.left - 7, y: at + 4, "text-anchor": "end" }, tickText(value)));
    }
    const step = (box.right - box.left) / spec.bars.length;
    this.places = spec.bars.map(([low, high, count], place) => {
      const size = (count / (1.05 * most)) * (box.bottom - box.top);
      const gap = Math.min(6, step * 0.18);
      const left = box.left + place * step + gap / 2;
      const rect = { x: left, width: Math.max(1, Math.min(64, step - gap)), y: box.bottom - size, height: size, class: "bar" };
      grid.append(svg("rect", rect));
      const name = low === high ? String(low) : `${low} to ${high}`;
      return { left, name, text: `${count.toLocaleString("en-US")} pushes, ${digits((100 * count) / total)} %` };
    });
    const every = Math.ceil(spec.bars.length / Math.max(2, Math.floor((box.right - box.left) / 40)));
    spec.bars.forEach(([low], place) => {
      if (place % every) return;
      const at = this.places[place].left + Math.max(1, Math.min(64, step - Math.min(6, step * 0.18))) / 2;
      grid.append(svg("text", { x: at, y: box.bottom + 17, "text-anchor": "middle" }, String(low)));
    });
    grid.append(svg("line", { class: "base", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }),
      svg("text", { class: "label", x: box.right, y: box.bottom + 31, "text-anchor": "end" }, spec.label));
    this.svg.append(grid);
    this.spec.caption = `pushes${unit.name ? ` (${unit.name})` : ""}${spec.summary ? `; ${spec.summary}` : ""}`;
    this.step = step;
    this.box = box;
  }

  point(left) {
    if (this.places) this.at(Math.floor((left - this.box.left) / this.step));
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step === undefined || !this.places) return;
    event.preventDefault();
    this.at(Math.max(0, Math.min(this.places.length - 1, (this.stop ?? -1) + step)));
  }

  at(place) {
    const found = this.places[place];
    this.stop = place;
    if (!found) return this.leave();
    return this.show(found.left, this.box.top, [[`staleness ${found.name}`, null], [found.text, null]]);
  }
}

const ROW = 22;
const APART = 3; // pixels: marks that are closer hide each other and are spread over the height of the row

// Return how far each mark of a row is moved down and its radius, so that none hides another; `places` are positions or null.
function spread(places) {
  const found = places.map(() => ({ down: 0, radius: 4.5 }));
  const sorted = places.map((at, one) => [at, one]).filter(([at]) => at !== null).sort((a, b) => a[0] - b[0]);
  for (let first = 0; first < sorted.length;) {
    const group = sorted.slice(first).filter(([at]) => at - sorted[first][0] < APART);
    const step = Math.min(7, (ROW - 10) / Math.max(1, group.length - 1));
    group.forEach(([, one], rank) => { found[one] = { down: (rank - (group.length - 1) / 2) * step, radius: Math.min(4.5, Math.max(3, 0.75 * step)) }; });
    first += group.length;
  }
  return found;
}

// Named rows with one mark per series; a bar if there is one series.
class Rows extends Figure {
  heightOf(spec) { return spec.rows.length * ROW + 40; }

  draw(spec, width, height) {
    const longest = Math.max(...spec.rows.map((row) => row.name.length));
    const box = { left: Math.min(width * 0.36, 14 + longest * 7), right: width - (spec.single ? 48 : 14), top: 4, bottom: height - 34 };
    const low = spec.single ? 0 : Math.max(0, Math.floor((Math.min(...spec.rows.flatMap((row) => row.values.filter(known))) - 3) / 10) * 10);
    const toX = (value) => box.left + ((value - low) / (100 - low || 1)) * (box.right - box.left);
    const grid = svg("g", { class: "axis" });
    for (const value of ticks(low, 100, Math.max(2, Math.floor((box.right - box.left) / 70)))) {
      grid.append(svg("line", { class: "grid", x1: toX(value), x2: toX(value), y1: box.top, y2: box.bottom }),
        svg("text", { x: toX(value), y: box.bottom + 17, "text-anchor": "middle" }, String(value)));
    }
    const most = Math.floor((box.left - 10) / 6.6);
    spec.rows.forEach((row, place) => {
      const middle = box.top + place * ROW + ROW / 2;
      const name = row.name.length > most ? `${row.name.slice(0, most - 1)}…` : row.name;
      const worst = row.name === spec.lowest ? " worst" : "";
      grid.append(svg("text", { x: box.left - 8, y: middle + 4, "text-anchor": "end", class: `name${worst}` }, name, svg("title", {}, row.name)));
      if (spec.single) this.bar(grid, row, middle, toX, low, worst);
      else this.dots(grid, spec, row, middle, toX, box);
    });
    grid.append(svg("text", { class: "label", x: box.right, y: box.bottom + 31, "text-anchor": "end" }, spec.label));
    this.svg.append(grid);
    this.box = box;
  }

  bar(grid, row, middle, toX, low, worst) {
    const value = row.values[0];
    if (!known(value)) return;
    grid.append(svg("rect", { class: `bar${worst}`, x: toX(low), width: Math.max(0, toX(value) - toX(low)), y: middle - 7, height: 14 }),
      svg("text", { x: toX(value) + 6, y: middle + 4, class: `value${worst}` }, value.toFixed(1)));
  }

  dots(grid, spec, row, middle, toX, box) {
    grid.append(svg("line", { class: "grid", x1: box.left, x2: box.right, y1: middle, y2: middle }));
    const beside = spread(row.values.map((value) => (known(value) ? toX(value) : null)));
    row.values.forEach((value, place) => {
      if (!known(value)) return;
      const [height, radius] = [middle + beside[place].down, beside[place].radius];
      const [corners, style] = [shapeOf(spec.numbers[place]), `fill:${colourOf(spec.numbers[place])}`];
      const points = corners?.map(([left, top]) => `${toX(value) + radius * left},${height + radius * top}`).join(" ");
      grid.append(points ? svg("polygon", { points, class: "dot", style }) : svg("circle", { cx: toX(value), cy: height, r: radius, class: "dot", style }));
    });
  }

  point(left, top) {
    if (!this.spec || !this.box) return;
    this.at(Math.floor((top - this.box.top) / ROW), left, top);
  }

  key(event) {
    const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (step === undefined || !this.spec) return;
    event.preventDefault();
    const place = Math.max(0, Math.min(this.spec.rows.length - 1, (this.stop ?? -1) + step));
    this.at(place, this.box.left, this.box.top + place * ROW);
  }

  at(place, left, top) {
    const row = this.spec.rows[place];
    this.stop = place;
    if (!row) return this.leave();
    const found = row.values
      .map((value, one) => [value, `${this.spec.single ? "" : `${this.spec.names[one]}: `}${KINDS.percent(value)}`, this.spec.numbers[one]])
      .filter(([value]) => known(value)).sort((a, b) => b[0] - a[0]);
    const lines = found.slice(0, 12).map(([, text, number]) => [text, this.spec.single ? null : spot(number)]);
    if (found.length > 12) lines.push([`and ${found.length - 12} more`, null]);
    return this.show(left, top + 14, [[row.name, null], ...lines]);
  }
}
