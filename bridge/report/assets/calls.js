// The table of calls: 100,000 rows of which some thirty exist at a time; filter, sort, keys, drill-down.
"use strict";
bridge.calls = () => {
  const { $, el, data, draw } = bridge;
  const ROW = 24; // pixels, as in the style sheet
  const SPARE = 12; // rows drawn beyond the window on either side
  const grid = $("calls");
  if (!grid) return;

  let pool, lower, columns, shown, count, search, details, figures, place;
  let order = new Int32Array(0); // rows after filter and sort
  let sorted = null; // {column, down}
  let active = -1; // position in `order`
  const facets = new Map(); // column -> select
  const rows = new Map(); // position -> element

  // ---- reading the columns

  function decode(column) {
    const isNumber = column.kind === "number";
    const values = isNumber ? new Float64Array(count) : new Int32Array(count);
    if ("same" in column) values.fill(column.same === null ? NaN : column.same);
    else if (column.steps) {
      let value = 0;
      column.steps.forEach((step, row) => { values[row] = value += step; });
    } else column.values.forEach((value, row) => { values[row] = value === null ? NaN : value; });
    return values;
  }

  function short(value) {
    if (Number.isNaN(value)) return "-";
    if (value === 0) return "0";
    const [mantissa, exponent] = Math.abs(value).toExponential(2).split("e");
    const power = Number(exponent), sign = value < 0 ? "-" : "";
    if (power < -2 || power > 4) return `${sign}${mantissa}e${power}`;
    const size = Number(`${mantissa}e${power}`);
    return sign + size.toFixed(Math.max(0, 2 - power));
  }

  function text(column, row) {
    const value = column.data[row];
    if (column.kind === "text") return value < 0 ? "" : pool[value];
    if (column.kind === "enum") return column.words[value];
    if (column.kind === "index") return value < 0 ? "" : String(value);
    return value === 0 && column.zero ? column.zero : column.width || value % 1 ? short(value) : String(value);
  }

  // ---- filter and sort

  /** Terms: words that must occur, -words that must not, out>1e-3 on a column of numbers. */
  function parse(query) {
    const tests = [];
    for (const token of query.trim().split(/\s+/).filter(Boolean)) {
      const compare = token.match(/^([a-z]+)(<=|>=|<|>|=)(.+)$/i);
      const column = compare && columns.find((item) => item.name === compare[1].toLowerCase() && item.kind === "number");
      const limit = compare ? Number(compare[3]) : NaN;
      if (column && !Number.isNaN(limit)) {
        const { data } = column;
        tests.push({
          ">": (row) => data[row] > limit, "<": (row) => data[row] < limit, "=": (row) => data[row] === limit,
          ">=": (row) => data[row] >= limit, "<=": (row) => data[row] <= limit,
        }[compare[2]]);
        continue;
      }
      const negated = token.length > 1 && token[0] === "-";
      const word = (negated ? token.slice(1) : token).toLowerCase();
      const hits = new Uint8Array(pool.length);
      lower.forEach((entry, number) => { if (entry.includes(word)) hits[number] = 1; });
      const enums = columns.filter((item) => item.kind === "enum" && item.width);
      const words = enums.map((item) => item.words.map((name) => name.toLowerCase() === word));
      // A word of a column of words ("forward", "born") means that column, not every source line with it.
      const found = words.some((list) => list.includes(true))
        ? (row) => enums.some((item, i) => words[i][item.data[row]])
        : (row) => search.some((item) => item.data[row] >= 0 && hits[item.data[row]]);
      tests.push(negated ? (row) => !found(row) : found);
    }
    return tests;
  }

  function ranks() {
    if (!place) {
      const numbers = Int32Array.from(pool, (_, number) => number);
      numbers.sort((a, b) => (pool[a] < pool[b] ? -1 : pool[a] > pool[b] ? 1 : 0));
      place = new Int32Array(pool.length);
      numbers.forEach((number, rank) => { place[number] = rank; });
    }
    return place;
  }

  function refresh(keep = order[active] ?? -1) {
    const tests = parse($("calls-filter").value);
    for (const [column, select] of facets) {
      const allowed = new Uint8Array(column.words.length);
      for (const number of column.choices[select.selectedIndex][1]) allowed[number] = 1;
      const { data } = column;
      tests.push((row) => allowed[data[row]]);
    }
    const kept = new Int32Array(count);
    let size = 0;
    for (let row = 0; row < count; row++) if (tests.every((test) => test(row))) kept[size++] = row;
    order = kept.subarray(0, size);
    if (sorted) {
      const { column, down } = sorted, { data } = column;
      const rank = column.kind === "text" ? ranks() : null;
      const value = rank ? (row) => (data[row] < 0 ? -1 : rank[data[row]]) : (row) => data[row];
      order.sort((a, b) => {
        const left = value(a), right = value(b);
        // Unknown values last, either way round; equal ones stay in execution order.
        if (Number.isNaN(left) || Number.isNaN(right)) return Number.isNaN(left) - Number.isNaN(right) || a - b;
        return (down ? right - left : left - right) || a - b;
      });
    }
    $("calls-count").textContent = `${size.toLocaleString("en")} of ${count.toLocaleString("en")} calls`;
    grid.setAttribute("aria-rowcount", size + 1);
    canvas.style.height = `${size * ROW}px`;
    active = keep < 0 ? -1 : order.indexOf(keep);
    repaint();
  }

  // ---- painting

  const head = el("div", undefined, { class: "grid-head", role: "row", "aria-rowindex": 1 });
  const body = el("div", undefined, { class: "grid-body", role: "rowgroup" });
  const canvas = el("div", undefined, { class: "grid-canvas", role: "presentation" });

  function rowElement(position) {
    const row = order[position];
    const line = el("div", undefined, { class: "grid-row", role: "row", "aria-rowindex": position + 2, id: `call-${row}` });
    line.style.transform = `translateY(${position * ROW}px)`;
    line.dataset.position = position;
    for (const column of shown) {
      const content = text(column, row);
      const cell = el("span", content, { role: "gridcell", class: column.kind === "number" ? "number" : column.name });
      if (column.kind === "text") cell.title = content;
      // A long key loses the middle of its path, never the call's own name.
      const cut = column.name === "key" ? content.lastIndexOf("/") : -1;
      if (cut > 0) cell.replaceChildren(el("span", content.slice(0, cut)), el("span", content.slice(cut)));
      if (column.kind === "enum") cell.dataset.word = content;
      line.append(cell);
    }
    if (details[row]) line.classList.add("has-detail");
    return line;
  }

  function paint() {
    const first = Math.max(0, Math.floor(body.scrollTop / ROW) - SPARE);
    const last = Math.min(order.length, Math.ceil((body.scrollTop + body.clientHeight) / ROW) + SPARE);
    for (const [position, line] of rows) {
      if (position < first || position >= last) { line.remove(); rows.delete(position); }
    }
    for (let position = first; position < last; position++) {
      if (rows.has(position)) continue;
      const line = rowElement(position);
      rows.set(position, line);
      canvas.append(line);
    }
    for (const [position, line] of rows) {
      const on = position === active;
      line.classList.toggle("active", on);
      line.setAttribute("aria-selected", on);
    }
    if (active >= 0 && rows.has(active)) grid.setAttribute("aria-activedescendant", `call-${order[active]}`);
    else grid.removeAttribute("aria-activedescendant");
  }

  function repaint() {
    for (const line of rows.values()) line.remove();
    rows.clear();
    paint();
  }

  function move(position) {
    if (!order.length) return;
    active = Math.max(0, Math.min(order.length - 1, position));
    const top = active * ROW;
    if (top < body.scrollTop) body.scrollTop = top;
    else if (top + ROW > body.scrollTop + body.clientHeight) body.scrollTop = top + ROW - body.clientHeight;
    paint();
  }

  function sortBy(column) {
    // Numbers start with the largest; a third click brings back execution order.
    const firstDown = column.kind === "number";
    if (!sorted || sorted.column !== column) sorted = { column, down: firstDown };
    else if (sorted.down === firstDown) sorted.down = !firstDown;
    else sorted = null;
    for (const item of shown) {
      const direction = sorted && sorted.column === item ? (sorted.down ? "descending" : "ascending") : "none";
      item.heading.setAttribute("aria-sort", direction);
    }
    body.scrollTop = 0;
    refresh();
  }

  // ---- drill-down

  function block(item) {
    const part = el("div", undefined, { class: `block ${item.kind}` });
    if (item.title) part.append(el("h3", item.title));
    if (item.kind === "facts") {
      const list = el("dl", undefined, { class: "list" });
      for (const [label, value] of item.items) list.append(el("dt", label), el("dd", value));
      part.append(list);
    } else if (item.kind === "table") {
      const table = el("table"), line = el("tr"), holder = el("div", undefined, { class: "scroll" });
      for (const name of item.head) line.append(el("th", name, { scope: "col" }));
      table.append(el("thead"), el("tbody"));
      table.tHead.append(line);
      for (const cells of item.rows) {
        const row = el("tr");
        cells.forEach((cell, column) => row.append(column ? el("td", cell) : el("th", cell, { scope: "row" })));
        table.tBodies[0].append(row);
      }
      if (item.head.length < 5) part.classList.add("narrow");
      holder.append(table);
      part.append(holder);
    } else {
      const figure = el("figure"), target = el("div", undefined, { class: "canvas", role: "img", "aria-label": item.summary });
      figure.append(target, el("figcaption", item.summary));
      part.append(figure);
      part.draw = () => draw(target, figures[item.name]);
    }
    return part;
  }

  async function open(row, focus) {
    const panel = $("detail");
    const key = columns.find((column) => column.name === "key");
    const facts = columns.map((column) => [column.title, text(column, row)]).filter(([, value]) => value && value !== "-");
    const close = el("button", "close", { type: "button", class: "close" });
    close.addEventListener("click", shut);
    const head = el("div", undefined, { class: "head" });
    head.append(el("h3", text(key, row)), el("span", `row ${row}`, { class: "muted" }), close);
    panel.replaceChildren(head, block({ kind: "facts", items: facts.slice(1) }));
    panel.firstChild.nextSibling.querySelector("dl").classList.add("wide");
    const blocks = (details[row] ?? []).map(block);
    if (blocks.length) {
      const holder = el("div", undefined, { class: "blocks" });
      holder.append(...blocks);
      panel.append(holder);
    }
    else panel.append(el("p", "No tensors are compared for this call; its statistics stand above.", { class: "muted" }));
    panel.hidden = false;
    history.replaceState(null, "", `#row=${row}`);
    for (const part of blocks) if (part.draw) await part.draw();
    if (focus) panel.scrollIntoView({ block: "nearest" });
    panel.dataset.row = row;
  }

  function shut() {
    $("detail").hidden = true;
    history.replaceState(null, "", "#table");
    grid.focus();
  }

  /** Show one row wherever it is, even where the filters hide it. */
  function reveal(row) {
    if (!(row >= 0 && row < count)) return;
    if (order.indexOf(row) < 0) {
      $("calls-filter").value = "";
      for (const [, select] of facets) select.selectedIndex = 0;
      refresh();
    }
    active = order.indexOf(row);
    body.scrollTop = Math.max(0, active * ROW - body.clientHeight / 2);
    paint();
    $("table").scrollIntoView({ block: "start" });
    open(row, false);
  }

  // ---- wiring

  function build() {
    shown = columns.filter((column) => column.width);
    grid.style.setProperty("--tracks", shown.map((column) => column.width).join(" "));
    grid.setAttribute("aria-colcount", shown.length);
    for (const column of shown) {
      column.heading = el("div", undefined, {
        role: "columnheader", "aria-sort": "none", class: column.kind === "number" ? "number" : column.name,
      });
      const button = el("button", column.title, { type: "button" });
      button.addEventListener("click", () => sortBy(column));
      column.heading.append(button);
      head.append(column.heading);
    }
    body.append(canvas);
    grid.append(head, body);
    for (const column of columns) {
      if (!column.choices) continue;
      const select = el("select", undefined, { "aria-label": column.title, "data-column": column.name });
      for (const [label] of column.choices) select.append(el("option", label));
      select.selectedIndex = column.chosen;
      select.addEventListener("change", () => { body.scrollTop = 0; refresh(); });
      facets.set(column, select);
      $("calls-count").before(select);
    }
    let waiting = 0;
    $("calls-filter").addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => { body.scrollTop = 0; refresh(); }, 80);
    });
    body.addEventListener("scroll", paint, { passive: true });
    new ResizeObserver(() => {
      // The heading has no scroll bar of its own to make room for.
      head.style.paddingRight = `calc(.6rem + ${body.offsetWidth - body.clientWidth}px)`;
      paint();
    }).observe(body);
    canvas.addEventListener("click", (event) => {
      const line = event.target.closest(".grid-row");
      if (!line) return;
      move(Number(line.dataset.position));
      open(order[active], false);
    });
    grid.addEventListener("keydown", (event) => {
      if (event.target !== grid || event.ctrlKey || event.metaKey || event.altKey) return;
      const page = Math.max(1, Math.floor(body.clientHeight / ROW) - 1);
      const target = {
        ArrowDown: active + 1, ArrowUp: active - 1, PageDown: active + page, PageUp: active - page, Home: 0, End: order.length - 1,
      }[event.key];
      if (target !== undefined) move(target);
      else if (event.key === "Enter" && active >= 0) open(order[active], true);
      else if (event.key === "Escape") shut();
      else return;
      event.preventDefault();
    });
    addEventListener("keydown", (event) => {
      const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
      if (event.key === "/" && !typing) { event.preventDefault(); $("calls-filter").focus(); }
      if (event.key === "Escape" && event.target === $("calls-filter")) grid.focus();
      if (event.key === "Escape" && $("detail").contains(event.target)) shut();
    });
    for (const button of document.querySelectorAll("button.show-row")) {
      button.addEventListener("click", () => reveal(Number(button.dataset.row)));
    }
  }

  function linkFigures() {
    const clicked = (name) => {
      const element = document.querySelector(`[data-figure="${name}"]`);
      if (element && element.on) {
        element.on("plotly_click", ({ points }) => {
          const row = points[0].customdata;
          if (Number.isInteger(row)) reveal(row);
        });
      }
    };
    clicked("flow");
    clicked("layer-op");
    const by = $("layers-by");
    if (by) {
      by.addEventListener("change", () => {
        const element = document.querySelector('[data-figure^="layer-"]');
        draw(element, figures[by.value]);
      });
    }
  }

  grid.ready = data().then((found) => {
    ({ details, figures } = found);
    ({ pool, count } = found.grid);
    lower = pool.map((entry) => entry.toLowerCase());
    columns = found.grid.columns;
    for (const column of columns) {
      column.data = decode(column);
      delete column.values;
      delete column.steps;
    }
    search = found.grid.search.map((name) => columns.find((column) => column.name === name));
    build();
    refresh();
    document.documentElement.dataset.grid = "ready";
    const wanted = location.hash.match(/^#row=(\d+)$/);
    if (wanted) reveal(Number(wanted[1]));
  });
  bridge.afterDraw = linkFigures;
};
