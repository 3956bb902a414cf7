// Fills in what is on the screen (previews and snippets), and the keyboard. The pages work without it, by links.
"use strict";

const fill = {
  async preview(place) {
    const answer = await fetch(place.dataset.preview);
    // The server escapes all text of shards, and no script but this file may run.
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const part = page.querySelector("main") || page.body;
    place.replaceChildren(...part.childNodes);
    place.dataset.filled = answer.ok ? "yes" : "error";
  },
  async snippet(place) {
    const answer = await fetch(place.dataset.snippet);
    const text = answer.ok ? await answer.text() : "";
    if (text || !place.matches(".tile")) place.textContent = text;
    place.dataset.filled = "yes";
  },
};

const watcher = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    watcher.unobserve(target);
    const kind = "preview" in target.dataset ? "preview" : "snippet";
    fill[kind](target).catch(() => { target.textContent = "The server does not answer."; });
  }
}, { rootMargin: "200px" });

function fillIn(part) {
  for (const place of part.querySelectorAll("[data-preview], [data-snippet]")) watcher.observe(place);
  for (const picture of part.querySelectorAll(".grid img")) {
    if (picture.complete && picture.src && !picture.naturalWidth && picture.currentSrc) replaceBroken(picture);
    else picture.addEventListener("error", () => replaceBroken(picture));
  }
}

// A thumbnail that cannot be made is replaced by a tile that says what the file is.
function replaceBroken(picture) {
  const tile = document.createElement("span");
  tile.className = "tile";
  tile.textContent = "no picture";
  picture.replaceWith(tile);
}
fillIn(document);

// A search that takes long answers with what it has found so far: ask on, until the page is full or somebody stops it.
async function searchOn(place) {
  const stopper = new AbortController();
  const button = place.querySelector("button");
  button.hidden = false;
  button.addEventListener("click", () => stopper.abort());
  const summary = document.querySelector(".summary");
  summary.ariaBusy = "true"; // read out at the end, not each second
  try {
    while (place.dataset.on) {
      const answer = await fetch(place.dataset.on, { signal: stopper.signal });
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (!answer.ok) throw new Error(page.querySelector(".problem")?.textContent || "The server does not answer.");
      takeOver(page, summary);
      const next = page.querySelector("[data-on]");
      place.dataset.on = next ? next.dataset.on : "";
      if (next) place.querySelector("progress").value = next.querySelector("progress").value;
    }
    place.remove();
  } catch (error) {
    place.textContent = stopper.signal.aborted ? "Stopped." : error.message;
  }
  summary.ariaBusy = "false";
}

// Adds what a further answer has found to the grid. A sample whose key was looked for may come a second time.
function takeOver(page, summary) {
  const grid = document.querySelector(".grid");
  const there = new Set([...grid.querySelectorAll("a")].map((link) => link.href));
  const samples = [...page.querySelectorAll(".grid > li:not(.none)")].filter((one) => !there.has(one.querySelector("a").href));
  if (samples.length) grid.querySelector(".none")?.remove();
  else grid.querySelector(".none")?.replaceWith(...page.querySelectorAll(".grid > .none"));
  const added = document.createDocumentFragment();
  added.append(...samples);
  const list = [...added.children];
  grid.append(added);
  list.forEach(fillIn);
  summary.replaceChildren(...page.querySelector(".summary").childNodes);
  document.querySelector(".unread")?.remove();
  summary.after(...page.querySelectorAll(".unread"));
  document.querySelector(".turn").replaceWith(page.querySelector(".turn"));
}

for (const place of document.querySelectorAll("[data-on]")) searchOn(place);

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, textarea, select, audio, video, .scroll, pre")) return;
  const turn = { j: "next", ArrowRight: "next", k: "prev", ArrowLeft: "prev" }[event.key];
  const wanted = turn ? document.querySelector(`a[rel=${turn}]`) : findKey(event.key);
  if (!wanted) return;
  event.preventDefault();
  if (wanted.matches("input")) wanted.focus();
  else wanted.click();
});

function findKey(key) {
  for (const one of document.querySelectorAll("[data-key]")) if (one.dataset.key === key) return one;
  return null;
}
