"use strict";
// Updates the fleet every two seconds, sorts and filters it. Values are set as text, never as HTML.
const table = document.getElementById("fleet");
if (table) {
  const SECONDS = 2;
  const headings = [...table.tHead.rows[0].cells];
  const formats = headings.map((heading) => heading.dataset.format);
  const filter = document.getElementById("filter");
  const input = filter.querySelector("input");
  const status = filter.querySelector("[role=status]");
  let sort = { column: 0, descending: false };
  let pods = null;

  const show = (value, format) =>
    value === null ? "–" : format === "share" ? `${Math.round(100 * value)} %` : format === "number" ? value.toLocaleString("en") : value;

  const compare = (a, b) => {
    const [x, y] = [a[sort.column], b[sort.column]];
    const order = typeof x === "string" ? x.localeCompare(y) : (x ?? -1) - (y ?? -1);
    return sort.descending ? -order : order;
  };

  const draw = () => {
    if (!pods) return;
    const wanted = input.value.toLowerCase();
    const shown = pods.filter((pod) => `${pod[0]} ${pod[1]}`.toLowerCase().includes(wanted)).sort(compare);
    const rows = shown.map((pod) => {
      const row = document.createElement("tr");
      pod.forEach((value, column) => {
        const cell = row.insertCell();
        cell.className = formats[column];
        const target = column ? cell : cell.appendChild(document.createElement("a"));
        if (!column) target.href = `/ui/pods/${encodeURIComponent(value)}/schedule`;
        target.textContent = show(value, formats[column]);
      });
      return row;
    });
    table.tBodies[0].replaceChildren(...rows);
    status.textContent = `${shown.length} of ${pods.length}`;
  };

  const update = async () => {
    try {
      const answer = await fetch("/ui/state.json");
      if (answer.status === 401) return location.reload();
      const state = await answer.json();
      pods = state.pods;
      document.getElementById("replica").textContent = state.replica;
      for (const cell of document.querySelectorAll("[data-total]")) {
        cell.textContent = show(state.totals[cell.dataset.total], cell.dataset.format);
      }
      draw();
    } catch (error) {
      status.textContent = "the router does not answer: these figures are old";
    }
    setTimeout(update, 1000 * SECONDS);
  };

  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.textContent = heading.textContent;
    button.addEventListener("click", () => {
      sort = { column, descending: sort.column === column ? !sort.descending : formats[column] !== "text" };
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", sort.descending ? "descending" : "ascending");
      draw();
    });
    heading.replaceChildren(button);
  });
  filter.hidden = false;
  input.addEventListener("input", draw);
  update();
}
