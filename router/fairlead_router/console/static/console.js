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

  // Unchanged text is left alone: a selection stays, and screen readers repeat nothing.
  const setText = (element, text) => {
    if (element.textContent !== text) element.textContent = text;
  };

  const compare = (a, b) => {
    const [x, y] = [a[sort.column], b[sort.column]];
    const order = typeof x === "string" ? (x < y ? -1 : x > y ? 1 : 0) : (x ?? -1) - (y ?? -1);
    return sort.descending ? -order : order;
  };

  const draw = () => {
    if (!pods) return;
    const wanted = input.value.toLowerCase();
    const shown = pods.filter((pod) => `${pod[0]} ${pod[1]}`.toLowerCase().includes(wanted)).sort(compare);
    const body = table.tBodies[0];
    while (body.rows.length > shown.length) body.deleteRow(-1);
    shown.forEach((pod, index) => {
      const row = body.rows[index] ?? body.insertRow();
      pod.forEach((value, column) => {
        const cell = row.cells[column] ?? row.insertCell();
        cell.className = formats[column];
        if (column) {
          setText(cell, show(value, formats[column]));
        } else {
          const link = cell.querySelector("a") ?? cell.appendChild(document.createElement("a"));
          link.href = `/ui/pods/${encodeURIComponent(value)}/schedule`;
          setText(link, value);
        }
      });
    });
    setText(status, `${shown.length} of ${pods.length}`);
  };

  const update = async () => {
    setTimeout(update, 1000 * SECONDS);
    if (document.hidden) return;
    try {
      const answer = await fetch("/ui/state.json", { signal: AbortSignal.timeout(1000 * SECONDS) });
      if (answer.status === 401) return location.reload();
      if (!answer.ok) throw new Error(answer.statusText);
      const state = await answer.json();
      pods = state.pods;
      setText(document.getElementById("replica"), state.replica);
      for (const cell of document.querySelectorAll("[data-total]")) {
        setText(cell, show(state.totals[cell.dataset.total], cell.dataset.format));
      }
      draw();
    } catch (error) {
      setText(status, "the router does not answer: these figures are old");
    }
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
