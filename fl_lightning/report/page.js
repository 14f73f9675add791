// SPDX-License-Identifier: Apache-2.0
// Draws the page's pictures with plotly.js, in the colours of the reader's theme.
"use strict";
(function () {
  const page = JSON.parse(document.getElementById("pictures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = window.matchMedia("(max-width: 640px)");
  const touch = window.matchMedia("(pointer: coarse)");
  let printing = false;

  function theme() {
    return dark.matches && !printing ? page.themes.dark : page.themes.light;
  }

  function faded(color, share) {
    const part = (start) => parseInt(color.slice(start, start + 2), 16);
    return `rgba(${part(1)},${part(3)},${part(5)},${share})`;
  }

  // "@c0" is the theme's first colour, "@c0/0.2" the same with opacity, "@blue" a scale, "@ink" the colour of text.
  function colored(token, colors) {
    const [name, share] = token.slice(1).split("/");
    if (colors.scales[name]) {
      const scale = colors.scales[name];
      return scale.map((color, k) => [k / (scale.length - 1), color]);
    }
    const color = /^c\d+$/.test(name) ? colors.colors[Number(name.slice(1))] : colors[name];
    return share === undefined ? color : faded(color, Number(share));
  }

  const COLORS = new Set(["color", "fillcolor", "colorscale"]);

  function resolved(value, colors, key) {
    if (typeof value === "string") {
      return COLORS.has(key) && value.startsWith("@") ? colored(value, colors) : value;
    }
    if (Array.isArray(value)) {
      return value.length && typeof value[0] === "object" ? value.map((entry) => resolved(entry, colors)) : value;
    }
    if (value === null || typeof value !== "object" || "bdata" in value) {
      return value;
    }
    return Object.fromEntries(Object.entries(value).map(([name, entry]) => [name, resolved(entry, colors, name)]));
  }

  function axis(given, colors) {
    const title = given.title && { ...given.title, standoff: 10, font: { size: 12.5, color: colors.muted } };
    return {
      gridcolor: colors.grid, linecolor: colors.grid, zerolinecolor: colors.grid, tickcolor: colors.grid,
      automargin: true, tickfont: { size: narrow.matches ? 11 : 12 }, ...given, title,
    };
  }

  function layoutOf(spec, colors) {
    const given = resolved(spec.layout, colors);
    const layout = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", height: spec.height,
      font: { family: page.fonts, size: 13, color: colors.ink }, separators: ".,",
      margin: narrow.matches ? { l: 44, r: 8, t: 8, b: 44 } : { l: 60, r: 16, t: 8, b: 48 },
      hoverlabel: { bgcolor: colors.panel, bordercolor: colors.grid, align: "left",
        font: { family: page.fonts, size: 12.5, color: colors.ink } },
      dragmode: touch.matches ? false : "zoom", ...given,
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colors.muted, activecolor: colors.ink },
      legend: { orientation: "h", x: 0, y: 1, xanchor: "left", yanchor: "bottom",
        font: { size: narrow.matches ? 11 : 12.5 }, ...given.legend },
    };
    for (const name of Object.keys(given).filter((key) => /^[xy]axis\d*$/.test(key))) {
      layout[name] = axis(given[name], colors);
    }
    if (printing) {
      layout.width = 680;
    }
    return layout;
  }

  function dataOf(spec, colors) {
    return resolved(spec.data, colors).map((trace) => {
      if (!trace.colorbar) {
        return trace;
      }
      const bar = { ...trace.colorbar, tickfont: { size: 11, color: colors.ink } };
      return { ...trace, colorbar: narrow.matches ? { ...bar, thickness: 8, title: { text: "" } } : bar };
    });
  }

  const CONFIG = {
    responsive: true, displaylogo: false, displayModeBar: touch.matches ? false : "hover",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  };
  const chosen = {};

  function draw(key) {
    const colors = theme();
    const spec = page.pictures[key][chosen[key] || 0];
    const place = document.getElementById(`plot-${key}`);
    return window.Plotly.react(place, dataOf(spec, colors), layoutOf(spec, colors), CONFIG);
  }

  // One after the other: the page stays quick to scroll, and its top is there first.
  async function drawAll() {
    for (const key of Object.keys(page.pictures)) {
      await draw(key);
      await new Promise((resume) => { setTimeout(resume); });
    }
  }

  for (const button of document.querySelectorAll(".buttons button")) {
    button.addEventListener("click", () => {
      const { picture, variant } = button.dataset;
      for (const other of button.parentElement.children) {
        other.setAttribute("aria-pressed", String(other === button));
      }
      chosen[picture] = Number(variant);
      draw(picture);
    });
  }
  dark.addEventListener("change", drawAll);
  narrow.addEventListener("change", drawAll);
  window.addEventListener("beforeprint", () => {
    printing = true;
    document.querySelectorAll("details").forEach((entry) => entry.setAttribute("open", ""));
    Object.keys(page.pictures).forEach(draw);  // the printer does not wait
  });
  window.addEventListener("afterprint", () => {
    printing = false;
    drawAll();
  });
  drawAll().then(() => { document.documentElement.dataset.drawn = Object.keys(page.pictures).length; });
})();
