// The verify page: expandable table rows, and the choice of the case whose errors are shown.
"use strict";
bridge.verdicts = () => {
  const { $, el, data, draw } = bridge;

  function expand(button, open) {
    button.setAttribute("aria-expanded", open);
    $(button.getAttribute("aria-controls")).classList.toggle("open", open);
  }

  const buttons = [...document.querySelectorAll("button.expand")];
  for (const button of buttons) {
    button.addEventListener("click", () => expand(button, button.getAttribute("aria-expanded") !== "true"));
  }
  const all = $("expand-all");
  if (all) {
    all.addEventListener("click", () => {
      const open = all.getAttribute("aria-pressed") !== "true";
      all.setAttribute("aria-pressed", open);
      all.textContent = open ? "Worst cases only" : "All cases";
      for (const button of buttons) expand(button, open);
    });
  }

  function fill(body, lines, failed) {
    body.replaceChildren(...lines.map((line, index) => {
      const row = el("tr", undefined, failed && failed[index] ? { class: "fail" } : {});
      line.forEach((cell, column) => {
        row.append(column ? el("td", cell) : el("th", cell, { scope: "row" }));
      });
      return row;
    }));
  }

  async function show(panel, index) {
    const { results, figures } = await data();
    const result = results[panel.dataset.key][index];
    panel.querySelector(".reason").textContent = result.reason;
    fill(panel.querySelector(".checks tbody"), result.checks, result.failed);
    const worst = panel.querySelector(".worst tbody");
    if (worst) fill(worst, result.worst);
    for (const kind of ["map", "histogram"]) {
      const figure = panel.querySelector(`figure.${kind}`);
      if (!figure) continue;
      const name = result[kind];
      figure.classList.toggle("absent", !name);
      if (!name) continue;
      figure.querySelector("figcaption .summary").textContent = result[kind + "_summary"];
      const canvas = figure.querySelector("[data-figure]");
      canvas.setAttribute("aria-label", result[kind + "_summary"]);
      await draw(canvas, figures[name]);
    }
  }

  for (const select of document.querySelectorAll("select.case")) {
    select.addEventListener("change", () => show(select.closest(".panel"), select.selectedIndex));
  }
};
