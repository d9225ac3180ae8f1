// The worker timeline: a lane per worker or group, with its use of time and absences.

const PART_NAMES = { computing: "computing", sending: "sending", waiting: "waiting", server: "at the server", away: "dead or away" };

class Timeline extends Figure {
  heightOf(spec) {
    this.lane = spec.lanes.length <= 8 ? 40 : spec.lanes.length <= 16 ? 30 : spec.lanes.length <= 24 ? 22 : 15;
    return spec.lanes.length * this.lane + 40;
  }

  draw(spec, width, height) {
    const longest = Math.max(...spec.lanes.map((lane) => lane.name.length), 2);
    const box = { left: 12 + longest * 7, right: width - 14, top: 2, bottom: height - 36 };
    const end = spec.end || 1;
    this.box = box;
    this.toX = (value) => box.left + (value / end) * (box.right - box.left);
    this.fromX = (left) => ((left - box.left) / (box.right - box.left)) * end;
    const paths = Object.fromEntries(["here", ...spec.parts].map((part) => [part, ""]));
    const names = svg("g", { class: "axis" });
    const every = Math.ceil(15 / this.lane);
    spec.lanes.forEach((lane, place) => {
      const top = box.top + place * this.lane + (this.lane > 14 ? 3 : 1);
      const size = this.lane - (this.lane > 14 ? 6 : 2);
      if (place % every === 0) names.append(svg("text", { x: box.left - 8, y: top + size / 2 + 4, "text-anchor": "end" }, lane.name));
      this.stays(lane, paths, spec, top, size, end);
      this.shares(lane, paths, spec, top, size);
    });
    const hatch = svg("pattern", { id: "hatch", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      svg("rect", { width: 5, height: 5, class: "hatch-ground" }), svg("line", { x1: 0, x2: 0, y1: 0, y2: 5, class: "hatch-line" }));
    this.svg.append(svg("defs", {}, hatch), names);
    for (const [part, path] of Object.entries(paths)) if (path) this.svg.append(svg("path", { class: `part ${part}`, d: path }));
    const unit = unitOf("seconds", end);
    for (const value of ticks(0, end / unit.size, Math.max(2, Math.floor((box.right - box.left) / 70)))) {
      const at = this.toX(value * unit.size);
      names.append(svg("line", { class: "tick", x1: at, x2: at, y1: box.bottom, y2: box.bottom + 4 }),
        svg("text", { x: at, y: box.bottom + 17, "text-anchor": "middle" }, digits(value, 6)));
    }
    names.append(svg("line", { class: "base", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }),
      svg("text", { class: "label", x: box.right, y: box.bottom + 31, "text-anchor": "end" }, `${spec.label} (${unit.name})`));
    this.spec.caption = spec.grouped ? "workers, many to a lane" : "worker";
    this.rule = svg("line", { class: "rule", y1: box.top, y2: box.bottom, visibility: "hidden" });
    this.svg.append(this.rule);
  }

  // Presence, and absence after the first join.
  stays(lane, paths, spec, top, size, end) {
    let last = null;
    for (const [begin, until] of lane.here) {
      if (last !== null && begin > last && !spec.grouped) paths.away += this.rect(last, begin, top, size);
      paths.here += this.rect(begin, until, top, size);
      last = until;
    }
    if (last !== null && last < end * 0.999 && !spec.grouped) paths.away += this.rect(last, end, top, size);
  }

  shares(lane, paths, spec, top, size) {
    for (const [begin, until, ...percents] of lane.segments) {
      const inside = this.within(lane, spec, begin, until);
      const here = inside.reduce((sum, [from, to]) => sum + to - from, 0);
      const whole = Math.max(percents.reduce((sum, one) => sum + one, 0), (100 * here) / (until - begin));
      for (const [from, to] of inside) {
        let bottom = top + size;
        percents.forEach((percent, place) => {
          const part = (percent / whole) * size;
          if (part > 0) paths[spec.parts[place]] += this.rect(from, to, bottom - part, part);
          bottom -= part;
        });
      }
    }
  }

  // The part of a segment in which the lane's only worker was present.
  within(lane, spec, begin, until) {
    if (spec.grouped || !lane.here.length) return [[begin, until]];
    return lane.here.map(([from, to]) => [Math.max(from, begin), Math.min(to, until)]).filter(([from, to]) => to > from);
  }

  rect(begin, until, top, size) {
    const left = this.toX(begin);
    return `M${left.toFixed(1)} ${top.toFixed(1)}h${Math.max(0.6, this.toX(until) - left).toFixed(1)}v${size.toFixed(1)}H${left.toFixed(1)}Z`;
  }

  point(left, top) {
    if (!this.spec || !this.box) return;
    this.at(Math.floor((top - this.box.top) / this.lane), left, top);
  }

  key(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -0.02], ArrowRight: [0, 0.02] }[event.key];
    if (!step || !this.spec) return;
    event.preventDefault();
    this.row = Math.max(0, Math.min(this.spec.lanes.length - 1, (this.row ?? -step[0]) + step[0]));
    this.share = Math.max(0, Math.min(1, (this.share ?? 0.5) + step[1]));
    const left = this.box.left + this.share * (this.box.right - this.box.left);
    this.at(this.row, left, this.box.top + this.row * this.lane);
  }

  at(place, left, top) {
    const lane = this.spec.lanes[place];
    const now = this.fromX(left);
    if (!lane || now < 0 || now > this.spec.end) return this.leave();
    this.rule.setAttribute("x1", left);
    this.rule.setAttribute("x2", left);
    this.rule.setAttribute("visibility", "visible");
    const title = `${lane.size > 1 ? "workers" : "worker"} ${lane.name}, ${clock(now)}`;
    const here = lane.here.some(([from, to]) => from <= now && now <= to);
    const segment = lane.segments.find(([from, to]) => from <= now && now <= to);
    const lines = [];
    if (!here && lane.here.length) lines.push([lane.here[0][0] > now ? "not here yet" : "dead or away", null]);
    else if (segment) {
      this.spec.parts.forEach((part, one) => {
        if (segment[one + 2]) lines.push([`${PART_NAMES[part]} ${segment[one + 2]} %`, `background:var(--${part})`]);
      });
    } else lines.push(["present", null]);
    return this.show(left, Math.min(top + 12, this.box.bottom - 30), [[title, null], ...lines]);
  }
}
