// A line chart: axes with units, bands, marks, a legend, and a readout that follows pointer and arrow keys.

const MARGIN = { top: 10, right: 14, bottom: 34, left: 50 };

class Figure {
  constructor(parent, title, { height = 230, wide = false } = {}) {
    this.height = height;
    this.title = title;
    this.caption = el("span", { class: "caption" });
    this.plot = el("div", { class: "plot", tabindex: "0", role: "img" });
    this.readout = el("div", { class: "readout", hidden: true });
    this.legend = el("ul", { class: "legend" });
    this.scale = el("button", { type: "button", class: "plain scale", hidden: true, onclick: () => this.rescale() });
    const heading = el("figcaption", {}, el("strong", {}, title), this.scale, this.caption);
    this.figure = el("figure", { class: wide ? "chart wide" : "chart" }, heading, this.plot, this.legend);
    parent.append(this.figure);
    this.width = 0;
    this.spec = null;
    new ResizeObserver(() => {
      const width = this.plot.clientWidth;
      if (width && width !== this.width) schedule(this);
    }).observe(this.plot);
    this.seen = !facts.live;
    if (facts.live) this.plot.style.minHeight = `${height}px`;
    if (facts.live) new IntersectionObserver(([entry]) => this.sight(entry.isIntersecting)).observe(this.figure);
    this.plot.addEventListener("pointermove", (event) => this.point(event.offsetX, event.offsetY));
    this.plot.addEventListener("pointerleave", () => this.leave());
    this.plot.addEventListener("blur", () => this.leave());
    this.plot.addEventListener("keydown", (event) => this.key(event));
  }

  update(spec) {
    const text = JSON.stringify(spec);
    this.figure.hidden = !spec;
    if (text === this.text) return;
    this.text = text;
    this.spec = spec;
    if (spec) schedule(this);
  }

  // Draw live updates only while the chart is visible.
  sight(seen) {
    this.seen = seen;
    if (seen && this.undrawn) schedule(this);
  }

  redraw() {
    this.undrawn = !this.seen;
    if (!this.seen || !this.spec || this.figure.hidden) return;
    this.width = this.plot.clientWidth;
    if (!this.width) return;
    const height = this.heightOf(this.spec);
    this.svg = svg("svg", { viewBox: `0 0 ${this.width} ${height}`, height, width: "100%", "aria-hidden": "true" });
    this.draw(this.spec, this.width, height);
    this.plot.style.minHeight = "";
    this.plot.replaceChildren(this.svg, this.readout);
    this.readout.hidden = true;
    setText(this.caption, this.spec.caption || "");
    this.plot.setAttribute("aria-label", `${this.title}. ${this.spec.summary || ""}`);
    this.legend.replaceChildren(...(this.spec.legend || []).map(([name, style]) =>
      el("li", {}, el("i", { style, class: "swatch" }), name)));
    this.legend.hidden = !(this.spec.legend || []).length;
  }

  heightOf() { return this.height; }

  rescale() {
    this.log = !(this.log ?? this.spec.y.log);
    schedule(this);
  }

  leave() {
    this.readout.hidden = true;
    if (this.rule) this.rule.setAttribute("visibility", "hidden");
  }

  show(left, top, lines) {
    this.readout.replaceChildren(...lines.map(([text, style]) =>
      el("div", {}, style ? el("i", { style, class: "swatch" }) : null, text)));
    this.readout.hidden = false;
    const room = this.plot.clientWidth - this.readout.offsetWidth - 4;
    const beside = left + 14 > room ? left - this.readout.offsetWidth - 14 : left + 14;
    this.readout.style.left = `${Math.max(0, Math.min(room, beside))}px`;
    this.readout.style.top = `${Math.max(0, top)}px`;
  }

  point() {}

  key() {}
}

const waiting = new Set();

// Draw everything that changed once, in the next frame.
function schedule(figure) {
  if (!waiting.size) requestAnimationFrame(drawWaiting);
  waiting.add(figure);
}

function drawWaiting() {
  const due = [...waiting];
  waiting.clear();
  due.forEach((one) => one.redraw());
}

class LineChart extends Figure {
  draw(spec, width, height) {
    const box = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom };
    this.box = box;
    const x = spanOf(spec.series.map((one) => one.x), spec.x);
    const asked = this.log ?? spec.y.log;
    const y = spanOf(spec.series.map((one) => one.y), { ...spec.y, log: asked, zero: spec.y.zero && !asked });
    const log = asked && y.low > 0;
    this.scale.hidden = !spec.y.scales;
    setText(this.scale, log ? "linear scale" : "log scale");
    this.toX = (value) => box.left + ((value - x.low) / (x.high - x.low || 1)) * (box.right - box.left);
    const place = log
      ? (value) => Math.log(Math.max(value, y.low) / y.low) / Math.log(y.high / y.low || 2)
      : (value) => (value - y.low) / (y.high - y.low || 1);
    const beyond = box.top - 2 * height; // a curve that leaves the axis is clipped, but far coordinates cannot be drawn
    this.toY = (value) => Math.max(beyond, box.bottom - place(value) * (box.bottom - box.top));
    this.axes(spec, x, y, log, box);
    const clip = `clip${(LineChart.number += 1)}`;
    const inside = svg("g", { "clip-path": `url(#${clip})` });
    const frame = { x: box.left - 4, y: box.top - 4, width: box.right - box.left + 8, height: box.bottom - box.top + 8 };
    this.svg.append(svg("clipPath", { id: clip }, svg("rect", frame)), inside);
    for (const mark of spec.marks || []) {
      const at = this.toX(mark.x);
      inside.append(svg("line", { class: "mark", x1: at, x2: at, y1: box.top, y2: box.bottom }, svg("title", {}, mark.text)));
    }
    for (const one of spec.series) this.line(inside, one);
    const told = spec.series.filter((one) => !one.grey);
    this.rule = svg("line", { class: "rule", y1: box.top, y2: box.bottom, visibility: "hidden" });
    this.svg.append(this.rule);
    this.stops = [...new Set((told.length ? told : spec.series).flatMap((one) => one.x.filter((_, i) => known(one.y[i]))))].sort((a, b) => a - b);
  }

  axes(spec, x, y, log, box) {
    const unitX = unitOf(spec.x.kind, x.high);
    const unitY = unitOf(spec.y.kind, Math.max(Math.abs(y.high), Math.abs(y.low)));
    const most = Math.floor((box.bottom - box.top) / 38);
    const marksY = log ? logTicks(y.low, y.high, most + 2) : ticks(y.low / unitY.size, y.high / unitY.size, most).map((one) => one * unitY.size);
    const grid = svg("g", { class: "axis" });
    for (const value of marksY) {
      const at = this.toY(value);
      grid.append(svg("line", { class: "grid", x1: box.left, x2: box.right, y1: at, y2: at }),
        svg("text", { x: box.left - 7, y: at + 4, "text-anchor": "end" }, tickText(value / unitY.size)));
    }
    const room = Math.max(2, Math.floor((box.right - box.left) / 70));
    const whole = spec.x.kind === "count" && unitX.size === 1;
    for (const value of ticks(x.low / unitX.size, x.high / unitX.size, room)) {
      if (whole && !Number.isInteger(value)) continue;
      const at = this.toX(value * unitX.size);
      grid.append(svg("line", { class: "tick", x1: at, x2: at, y1: box.bottom, y2: box.bottom + 4 }),
        svg("text", { x: at, y: box.bottom + 17, "text-anchor": "middle" }, digits(value, 6)));
    }
    grid.append(svg("line", { class: "base", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
    const nameX = spec.x.label + (unitX.name ? ` (${unitX.name})` : "");
    grid.append(svg("text", { class: "label", x: box.right, y: box.bottom + 31, "text-anchor": "end" }, nameX));
    this.spec.caption = spec.y.label + (unitY.name ? ` (${unitY.name})` : "") + (log ? ", log scale" : "") + (spec.note || "");
    this.svg.append(grid);
  }

  line(parent, one) {
    if (one.low) parent.append(svg("path", { class: "band", d: this.area(one), style: `fill:${one.colour}` }));
    const places = one.x.map((_, place) => place).filter((place) => known(one.x[place]) && known(one.y[place]));
    let path = "";
    places.forEach((place, order) => {
      const [left, top] = [this.toX(one.x[place]).toFixed(1), this.toY(one.y[place]).toFixed(1)];
      path += order ? (one.steps ? `H${left}V${top}` : `L${left} ${top}`) : `M${left} ${top}`;
    });
    const style = `stroke:${one.colour};stroke-dasharray:${one.dash || "none"}`;
    if (!one.scattered) parent.append(svg("path", { class: one.grey ? "line grey" : one.faint ? "line faint" : "line", d: path, style }, one.grey ? svg("title", {}, one.name) : null));
    if (places.length <= (one.dots ?? 24)) {
      for (const place of places) {
        const at = { cx: this.toX(one.x[place]).toFixed(1), cy: this.toY(one.y[place]).toFixed(1) };
        parent.append(svg("circle", { ...at, r: places.length === 1 || one.scattered ? 4 : 2.6, style: `fill:${one.colour}` }));
      }
    }
  }

  // Return the outline of a band: a piece for each stretch of neighbours that have one.
  area(one) {
    const at = (place, value) => `${this.toX(one.x[place]).toFixed(1)} ${this.toY(value).toFixed(1)}`;
    return stretchesOf(one.low, one.high).map((places) => {
      const up = places.map((place) => at(place, one.high[place]));
      const down = places.reverse().map((place) => at(place, one.low[place]));
      return `M${up.join("L")}L${down.join("L")}Z`;
    }).join("");
  }

  point(left) {
    if (!this.spec || !this.stops || !this.stops.length) return;
    let best = 0;
    this.stops.forEach((stop, place) => {
      if (Math.abs(this.toX(stop) - left) < Math.abs(this.toX(this.stops[best]) - left)) best = place;
    });
    this.at(best);
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") this.leave();
    if (step === undefined || !this.stops || !this.stops.length) return;
    event.preventDefault();
    const wide = Math.max(1, Math.round(this.stops.length / 60));
    this.at(Math.max(0, Math.min(this.stops.length - 1, (this.stop ?? 0) + step * wide)));
  }

  at(stop) {
    this.stop = stop;
    const value = this.stops[stop];
    const left = this.toX(value);
    this.rule.setAttribute("x1", left);
    this.rule.setAttribute("x2", left);
    this.rule.setAttribute("visibility", "visible");
    const { x, y, series } = this.spec;
    const reach = this.spec.exact ? 1e-9 : 12;
    const found = [];
    for (const one of series) {
      if (one.grey) continue;
      let near = -1;
      one.x.forEach((other, place) => {
        if (known(one.y[place]) && (near < 0 || Math.abs(other - value) < Math.abs(one.x[near] - value))) near = place;
      });
      if (near < 0 || Math.abs(this.toX(one.x[near]) - left) > reach) continue;
      const band = one.low && known(one.low[near]) ? ` (${KINDS[y.kind](one.low[near])} to ${KINDS[y.kind](one.high[near])})` : "";
      found.push([one.y[near], `${one.name}: ${KINDS[y.kind](one.y[near])}${band}`, `background:${one.colour}`]);
    }
    if (series.length > 3) found.sort((a, b) => b[0] - a[0]);
    const rows = found.slice(0, 12).map(([, text, style]) => [text, style]);
    if (found.length > 12) rows.push([`and ${found.length - 12} more`, null]);
    this.show(left, this.box.top, [[KINDS[x.kind](value), null], ...rows]);
  }
}

LineChart.number = 0;

// Return the places of each stretch of two neighbours or more that have a low and a high value.
function stretchesOf(low, high) {
  const found = [[]];
  low.forEach((value, place) => {
    if (known(value) && known(high[place])) found.at(-1).push(place);
    else if (found.at(-1).length) found.push([]);
  });
  return found.filter((places) => places.length > 1);
}

// Return the limits of an axis: all values up to `cap`, and a margin above.
function spanOf(columns, { floor, ceiling, cap, zero, tight, kind, log }) {
  let low = Infinity;
  let high = -Infinity;
  for (const column of columns) {
    for (const value of column) {
      if (!known(value) || (log && value <= 0)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  if (low > high) return { low: 0, high: 1 };
  if (known(cap)) high = Math.min(cap, high);
  if (zero) low = Math.min(0, low);
  if (kind === "seconds" || tight) low = Math.min(0, low);
  if (high === low) {
    const room = Math.abs(high) * 0.05 || 1;
    [low, high] = [low - (zero || tight ? 0 : room), high + room];
  } else if (!tight && kind !== "seconds" && !log) {
    const room = (high - low) * 0.06;
    high += room;
    if (!zero || low < 0) low -= room;
  }
  if (known(floor)) low = Math.max(floor, low);
  if (known(ceiling)) high = Math.min(ceiling, high);
  return { low, high };
}
