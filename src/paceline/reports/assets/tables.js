// Sortable tables, lists of facts, and button groups.

// Columns: {name, title, number, value(row) -> sort key, cell(row) -> text or element}.
class SortedTable {
  constructor(parent, columns, { caption, sortBy = null, falling = false, most = Infinity } = {}) {
    this.columns = columns;
    this.most = most;
    this.sort = { by: sortBy, falling };
    this.head = el("tr");
    this.body = el("tbody");
    const table = el("table", {}, caption ? el("caption", {}, caption) : null, el("thead", {}, this.head), this.body);
    parent.append(el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption || "table" }, table));
    this.more = el("button", { type: "button", class: "plain more", hidden: true, onclick: () => {
      this.whole = !this.whole;
      this.draw();
    } });
    parent.append(this.more);
  }

  update(rows, columns = this.columns) {
    this.rows = rows;
    this.columns = columns;
    this.draw();
  }

  draw() {
    const text = JSON.stringify([this.columns.map((one) => one.title), this.sort, this.whole, this.rows.map((row) => this.columns.map((one) => [one.value(row), row.key, row.state]))]);
    if (text === this.text) return;
    this.text = text;
    this.head.replaceChildren(...this.columns.map((column) => this.headOf(column)));
    const by = this.columns.find((one) => one.name === this.sort.by);
    const rows = by ? [...this.rows].sort((a, b) => order(by.value(a), by.value(b), this.sort.falling)) : this.rows;
    const cut = rows.length - this.most > 2 ? rows.length - this.most : 0; // one or two more cost no more than the button
    this.more.hidden = !cut;
    setText(this.more, this.whole ? `only the first ${this.most}` : `${cut} more`);
    this.body.replaceChildren(...(cut && !this.whole ? rows.slice(0, this.most) : rows).map((row) => el("tr", { class: row.className, "data-key": row.key },
      ...this.columns.map((column, place) => {
        const shown = column.cell ? column.cell(row) : String(column.value(row) ?? "–");
        return el(place ? "td" : "th", { class: column.number ? "number" : null, scope: place ? null : "row" }, shown);
      }))));
  }

  headOf(column) {
    const pressed = this.sort.by === column.name;
    const sorted = pressed ? (this.sort.falling ? "descending" : "ascending") : null;
    const button = el("button", { type: "button", title: column.help || null, onclick: () => {
      this.sort = { by: column.name, falling: pressed ? !this.sort.falling : Boolean(column.number) };
      this.draw();
    } }, ...wrapped(column.title, pressed ? (this.sort.falling ? "↓" : "↑") : ""));
    return el("th", { scope: "col", class: column.number ? "number" : null, "aria-sort": sorted }, button);
  }
}

// Break a title after a comma only, not before its arrow.
function wrapped(title, arrow) {
  const parts = title.split(", ").map((part) => el("span", { class: "unbroken" }, part));
  parts.slice(0, -1).forEach((part) => part.append(","));
  parts.at(-1).append(el("span", { class: "arrow", "aria-hidden": "true" }, arrow));
  return parts.flatMap((part, place) => (place ? [" ", part] : [part]));
}

// Unknown values come last in either order.
function order(a, b, falling) {
  const [emptyA, emptyB] = [a, b].map((value) => value === null || value === undefined || value === "");
  if (emptyA || emptyB) return emptyA - emptyB;
  const found = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  return falling ? -found : found;
}

class Choice {
  constructor(parent, label, options, onchange) {
    this.onchange = onchange;
    this.box = el("div", { class: "choice", role: "group", "aria-label": label });
    parent.firstChild.append(this.box); // in the heading
    this.value = options[0]?.[0] ?? null;
    this.offer(options);
  }

  set(value) {
    this.value = value;
    for (const button of this.box.children) button.setAttribute("aria-pressed", String(button.dataset.value === value));
  }

  // Show these options, [value, text] each; one alone is no choice.
  offer(options) {
    drawOnce(this.box, options, () => this.box.replaceChildren(...options.map(([value, text]) =>
      el("button", { type: "button", "data-value": value, onclick: () => { this.set(value); this.onchange(value); } }, text))));
    this.box.hidden = options.length < 2;
    this.set(this.value);
  }
}

// Call `draw` unless `value` is unchanged since the element was last drawn.
function drawOnce(element, value, draw) {
  const text = JSON.stringify(value);
  if (element.drawnFrom === text) return;
  element.drawnFrom = text;
  draw();
}

function factList(parent, pairs, boxed = false) {
  const facts = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]);
  parent.replaceChildren(...(boxed ? facts.map((pair) => el("div", {}, ...pair)) : facts.flat()));
}

// If an odd number of charts fills two columns, the last one spans both.
function settle(grid) {
  const shown = [...grid.children].filter((one) => !one.hidden);
  shown.forEach((one, place) => one.classList.toggle("both", place === shown.length - 1 && shown.length % 2 === 1));
}

function settingText(value) {
  if (value === null || value === undefined) return "–";
  if (Array.isArray(value)) return value.map(settingText).join(", ");
  if (known(value)) return String(Number(value.toPrecision(10)));
  return String(value);
}

// Set a text with flags, as in --lr 0.005, at which no line breaks.
function setAdvice(element, text) {
  drawOnce(element, text, () => element.replaceChildren(...text.split(/(--[a-z][a-z-]*)/).map((part, place) => (place % 2 ? el("span", { class: "unbroken" }, part) : part))));
}

function section(parent, title, id) {
  const found = el("section", { "aria-labelledby": id }, el("div", { class: "heading" }, el("h2", { id }, title)));
  parent.append(found);
  return found;
}
