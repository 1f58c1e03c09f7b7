"use strict";
const find = document.getElementById("find"), NAMES = JSON.parse(document.getElementById("names").textContent);
const rows = [...document.querySelectorAll("tr.layer")], folds = [...document.querySelectorAll("tr.fold")];
let show = "all";

// --- theme: the system's, until the reader says otherwise
const dark = matchMedia("(prefers-color-scheme: dark)");
const paint = (theme) => { document.documentElement.dataset.theme = theme; };
paint(dark.matches ? "dark" : "light");
dark.addEventListener("change", (event) => paint(event.matches ? "dark" : "light"));
const flip = () => paint(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
document.getElementById("theme").addEventListener("click", flip);

// --- names: ⟦3⟧ in a stored body is the third name of the layer that is opened
const escaped = (text) => text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const filled = (text, names) => text.replace(/⟦(\d+)⟧/g, (_, i) => names[i]);

// --- filter
function apply() {
  const words = find.value.toLowerCase().split(/\s+/).filter(Boolean), all = !words.length && show === "all";
  let fits = 0;
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    const fit = (show === "all" || row.dataset.verdict === show) && words.every((word) => text.includes(word));
    fits += fit;
    const fold = row.parentElement.querySelector("tr.fold");
    row.hidden = !fit || (all && fold !== null && fold.getAttribute("aria-expanded") === "false");
    if (row.hidden) close(row);
  }
  for (const fold of folds) fold.hidden = !all;
  const none = document.getElementById("none");
  if (none) none.hidden = fits > 0;
  document.getElementById("count").textContent = all ? "" : `${fits} of ${rows.length}`;
}
find.addEventListener("input", apply);
for (const button of document.querySelectorAll("[data-show]"))
  button.addEventListener("click", () => {
    show = button.dataset.show;
    for (const other of document.querySelectorAll("[data-show]")) other.setAttribute("aria-pressed", other === button);
    apply();
  });

// --- open and close
function close(row) {
  if (row.getAttribute("aria-expanded") !== "true") return;
  row.setAttribute("aria-expanded", "false");
  row.nextElementSibling.remove();
}
function open(row) {
  const names = NAMES[row.dataset.names].map(escaped), detail = document.createElement("tr");
  detail.className = "detail";
  detail.innerHTML = `<td colspan="6">${filled(document.getElementById("detail" + row.dataset.detail).innerHTML, names)}</td>`;
  row.after(detail);
  row.setAttribute("aria-expanded", "true");
  const data = detail.querySelector("script.nodes");
  if (!data) return;
  const raw = NAMES[row.dataset.names], fill = (_, value) => (typeof value === "string" ? filled(value, raw) : value);
  const nodes = JSON.parse(data.textContent, fill), before = detail.querySelectorAll('[data-stage="before"]').length;
  for (const box of detail.querySelectorAll(".node"))
    box.addEventListener("click", () => inspect(detail, box, nodes[+box.dataset.n + (box.dataset.stage === "after" ? before : 0)]));
  const lost = detail.querySelector(".node.lost");
  if (lost) {
    lost.dispatchEvent(new Event("click"));
    const scroll = lost.closest(".scroll"), at = lost.getBoundingClientRect(), top = scroll.getBoundingClientRect().top;
    scroll.scrollTop = at.top - top - 120;
  }
}
function inspect(detail, box, node) {
  for (const old of detail.querySelectorAll(".on")) old.classList.remove("on");
  box.classList.add("on");
  for (const edge of box.closest("svg").querySelectorAll("path"))
    edge.classList.toggle("on", edge.dataset.a === box.dataset.n || edge.dataset.b === box.dataset.n);
  const shown = { node: node.name, role: node.role, operator: node.op, arguments: node.args, value: node.value,
    means: node.fact, "meaning lost": node.loss, line: [node.source, node.code].filter(Boolean).join("   "),
    rewrite: node.gone === undefined ? "" : node.gone ? "removed" : "stays" };
  const list = document.createElement("dl");
  for (const [key, value] of Object.entries(shown)) {
    if (!value) continue;
    list.append(Object.assign(document.createElement("dt"), { textContent: key }));
    list.append(Object.assign(document.createElement("dd"), { textContent: value }));
  }
  detail.querySelector(".panel").replaceChildren(list);
}
function toggle(row) {
  if (row.classList.contains("fold")) {
    const opened = row.getAttribute("aria-expanded") === "true";
    row.setAttribute("aria-expanded", !opened);
    apply();
  } else if (row.getAttribute("aria-expanded") === "true") close(row);
  else open(row);
}
const table = document.getElementById("layers");
if (table) table.addEventListener("click", (event) => {
  const row = event.target.closest("tr.layer, tr.fold");
  if (row) toggle(row);
});

// --- keyboard
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = document.activeElement === find, here = document.activeElement.closest("tr.layer, tr.fold");
  const seen = [...document.querySelectorAll("tr.layer, tr.fold")].filter((row) => !row.hidden);
  const step = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
  if (event.key === "Escape") {
    if (typing || !here) { find.value = ""; show = "all"; document.querySelector('[data-show="all"]').click(); document.activeElement.blur(); }
    else close(here);
  } else if (event.key === "/" && !typing) find.focus();
  else if (event.key === "d" && !typing) flip();
  else if (step && !(typing && event.key.length === 1) && !document.activeElement.classList.contains("scroll")) {
    const next = seen[Math.max(0, Math.min(seen.length - 1, (here ? seen.indexOf(here) : step > 0 ? -1 : seen.length) + step))];
    if (next) next.focus();
  } else if (here && (event.key === "Enter" || event.key === " ")) toggle(here);
  else return;
  event.preventDefault();
});
