// The page: one run, or several and one of them in full. A live page redraws runs that changed.

const facts = JSON.parse(document.getElementById("facts").textContent);
const runs = new Map(facts.runs.map((run) => [run.id, run]));

class Page {
  constructor(root) {
    root.replaceChildren();
    this.several = null;
    this.one = null;
    this.chosen = null;
    this.picked = false;
    this.root = root;
    this.title = el("h1");
    this.status = el("span", { class: "badge" });
    this.live = el("span", { class: "feed", role: "status", hidden: true });
    root.append(el("header", {}, el("div", { class: "brand" }, "Paceline"), el("div", { class: "heading" }, this.title, this.status, this.live)));
    this.body = el("div");
    root.append(this.body);
  }

  update() {
    const all = [...runs.values()];
    if (facts.live) all.sort((a, b) => (b.made || "").localeCompare(a.made || ""));
    tellApart(all);
    if (all.length) shorten(all);
    if (!all.length) {
      setText(this.title, "No runs yet");
      return;
    }
    if (all.length > 1 !== Boolean(this.several) || !this.one) this.build(all.length > 1);
    if (this.several) {
      setText(this.title, `${all.length} runs`);
      this.status.hidden = true;
      this.several.update(all);
      this.pick(all);
    } else this.head(all[0]);
    this.one.update((this.several && runs.get(this.chosen)) || all[0]);
  }

  head(run) {
    setText(this.title, run.title || run.name);
    setText(this.status, run.status);
    this.status.className = `badge ${run.status}`;
  }

  build(several) {
    this.body.replaceChildren();
    const [top, beside] = [el("div", { class: facts.live ? "short" : null }), el("div")];
    const box = el("div", several ? { class: "inner" } : {});
    this.box = box;
    this.body.append(top, ...(facts.live ? [box, beside] : [beside, box]));
    this.several = several ? new SeveralRuns(top, beside, (name) => this.open(name)) : null;
    if (several) {
      this.select = el("select", { "aria-label": "which run", onchange: () => { location.hash = encodeURIComponent(runs.get(this.select.value).name); } });
      box.append(el("div", { class: "heading" }, el("h2", {}, "One run in full"), this.select));
    }
    this.one = new OneRun(box, "one", several);
  }

  // The selected run is kept in the URL, so that it can be linked to.
  open(name) {
    const run = [...runs.values()].find((one) => one.name === name);
    if (!run || !this.several) return;
    this.chosen = run.id;
    this.picked = true;
    this.update();
    this.box.scrollIntoView();
  }

  pick(all) {
    const busy = facts.live && !this.picked ? all.filter((run) => run.going_on) : [];
    if (busy.length) this.chosen = busy.reduce((a, b) => ((b.made || "") > (a.made || "") ? b : a)).id;
    if (!runs.has(this.chosen)) {
      const [best] = ranked(groupsOf(all)[0][1]);
      this.chosen = (best || all[0]).id;
    }
    drawOnce(this.select, all.map((run) => [run.id, run.short]), () =>
      this.select.replaceChildren(...all.map((run) => el("option", { value: run.id, title: run.name }, run.short))));
    this.select.value = this.chosen;
  }

  feed(text, state) {
    this.live.hidden = false;
    this.live.className = `feed ${state}`;
    setText(this.live, text);
  }
}

// Runs of the same name get the name of their parent folder.
function tellApart(all) {
  const counts = new Map();
  for (const run of all) counts.set(run.name, (counts.get(run.name) || 0) + 1);
  for (const run of all) if (counts.get(run.name) > 1) run.name = run.id.split("/").slice(-2).join("/");
}

const page = new Page(document.getElementById("page"));
page.update();

function openAddressed() {
  if (location.hash) page.open(decodeURIComponent(location.hash.slice(1)));
}

window.addEventListener("hashchange", openAddressed);
openAddressed();
drawWaiting();
document.documentElement.dataset.drawn = "true";
