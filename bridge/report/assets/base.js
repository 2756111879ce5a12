// What every report page needs: theme, packed data, figures. No network, one global, `bridge`.
"use strict";
const bridge = (() => {
  const root = document.documentElement;
  const $ = (id) => document.getElementById(id);
  const swap = JSON.parse($("palette").textContent);
  let packed = null;
  let engine = null;
  const drawn = new Map(); // element -> figure

  function theme() {
    if (root.dataset.theme) return root.dataset.theme;
    return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  }

  async function unpack(id) {
    const raw = atob($(id).textContent.trim());
    const bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }

  /** The page's data, unpacked once. */
  function data() {
    packed ??= unpack("data").then(JSON.parse);
    return packed;
  }

  /** Plotly, unpacked and run once. */
  function plotly() {
    engine ??= unpack("plotly").then((code) => {
      const script = document.createElement("script");
      script.textContent = code;
      document.head.append(script);
      return window.Plotly;
    });
    return engine;
  }

  function recolour(node) {
    if (Array.isArray(node)) return node.map(recolour);
    if (node && typeof node === "object") {
      return Object.fromEntries(Object.entries(node).map(([key, value]) => [key, recolour(value)]));
    }
    return theme() === "dark" && typeof node === "string" && swap[node] ? swap[node] : node;
  }

  const config = {
    responsive: true, displaylogo: false,
    // Plotly's own button uploads the figure: what a run computed stays here.
    showSendToCloud: false, plotlyServerURL: "",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  };

  /** Draw a figure into an element, in the present theme. */
  async function draw(element, figure) {
    const engine = await plotly();
    drawn.set(element, figure);
    const { data, layout } = recolour(figure);
    element.style.minHeight = "";
    await engine.react(element, data, layout, config);
    element.dataset.drawn = theme();
  }

  async function drawAll() {
    const { figures } = await data();
    for (const element of document.querySelectorAll("[data-figure]")) {
      const figure = figures[element.dataset.figure];
      if (figure) await draw(element, figure);
      // Let the page answer between two figures.
      await new Promise((next) => setTimeout(next));
    }
    bridge.afterDraw?.();
    root.dataset.ready = "figures";
  }

  function redraw() {
    return Promise.all([...drawn].map(([element, figure]) => draw(element, figure)));
  }

  function setTheme(name) {
    root.dataset.theme = name;
    try { localStorage.setItem("bridge-theme", name); } catch (error) { /* storage may be forbidden */ }
    label();
    return redraw();
  }

  function label() {
    const button = $("theme");
    button.textContent = theme() === "dark" ? "Light theme" : "Dark theme";
  }

  function el(tag, text, attributes = {}) {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    return node;
  }

  function start() {
    label();
    $("theme").addEventListener("click", () => setTheme(theme() === "dark" ? "light" : "dark"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { label(); redraw(); });
    // Paper is white: figures are printed in the light colours.
    let before = null;
    addEventListener("beforeprint", () => { before = root.dataset.theme ?? ""; root.dataset.theme = "light"; redraw(); });
    addEventListener("afterprint", () => {
      if (before) root.dataset.theme = before; else delete root.dataset.theme;
      redraw();
    });
    drawAll().catch((error) => {
      for (const element of document.querySelectorAll("[data-figure]")) {
        element.textContent = "The figure could not be drawn (" + error.message + "); its summary stands below.";
      }
      root.dataset.ready = "failed";
    });
  }
  return { $, el, data, draw, start, theme, setTheme };
})();
