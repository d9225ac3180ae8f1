// The feed of a live page: digests that changed, as server-sent events; come back to after any loss.

const AGAIN_MILLISECONDS = 2000;
const MOST_FOLLOWED = 60;

// Digests that come faster than frames are drawn once, and while nobody sees the page not at all.
let undrawn = false;

function take(digests, whole) {
  if (whole) runs.clear();
  for (const digest of digests) runs.set(digest.id, digest);
  for (const [id, run] of runs) if (runs.size > MOST_FOLLOWED && !run.going_on && id !== page.chosen) runs.delete(id);
  if (undrawn) return;
  undrawn = true;
  requestAnimationFrame(() => {
    undrawn = false;
    page.update();
    entitle();
  });
}

function entitle() {
  const run = runs.get(page.chosen) || [...runs.values()][0];
  if (!run) return;
  const share = run.going_on && known(run.figures.fraction) ? `${Math.floor(100 * run.figures.fraction)} %` : run.status;
  document.title = `${share} – ${run.name} – Paceline`;
}

function follow(address) {
  const source = new EventSource(address);
  let last = null;
  const hear = (whole) => (event) => {
    last = event.lastEventId;
    take(JSON.parse(event.data), whole);
  };
  source.onopen = () => page.feed("live", "on");
  source.onmessage = hear(false);
  source.addEventListener("all", hear(true));
  source.onerror = () => {
    if (!page.live.classList.contains("off")) page.feed(`connection lost at ${new Date().toLocaleTimeString("en-GB")}, trying again`, "off");
    // An answer that is no feed (another token, no room) ends a source for good.
    if (source.readyState === EventSource.CLOSED) setTimeout(follow, AGAIN_MILLISECONDS, last ? `/events?after=${last}` : address);
  };
}

if (facts.live) {
  entitle();
  follow(facts.live);
}
