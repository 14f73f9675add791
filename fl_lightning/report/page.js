// SPDX-License-Identifier: Apache-2.0
// Draws the pictures of a report with plotly.js, in the colours of the reader's theme.
"use strict";
(function () {
  const text = document.getElementById("pictures").textContent;
  const { themes, fonts, pictures } = JSON.parse(text);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = window.matchMedia("(max-width: 640px)");
  const touch = window.matchMedia("(pointer: coarse)").matches;
  const chosen = {};
  let printing = false;

  // "@c0" is the theme's first colour, "@c0+22" the same with opacity, "@blue" a scale, "@ink" the colour of text.
  // No other text begins with "@": names have a mark in front of them.
  function specsOf(theme) {
    const colored = (token, name, share) => JSON.stringify(share ? theme[name] + share.slice(1) : theme[name]);
    return JSON.parse(text.replace(/"@(\w+?)(\+\w\w)?"/g, colored)).pictures;
  }

  function templateOf(theme) {
    const axis = {
      gridcolor: theme.grid, linecolor: theme.grid, zerolinecolor: theme.grid, tickcolor: theme.grid, automargin: true,
      tickfont: { size: narrow.matches ? 11 : 12 }, title: { standoff: 10, font: { size: 12.5, color: theme.muted } },
    };
    const bar = {
      thickness: narrow.matches ? 8 : 12, outlinewidth: 0, tickfont: { size: 11, color: theme.ink },
      title: { side: "right" },
    };
    return {
      data: { heatmap: [{ colorbar: bar }] },
      layout: {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", separators: ".,", xaxis: axis, yaxis: axis,
        font: { family: fonts, size: 13, color: theme.ink }, dragmode: touch ? false : "zoom",
        margin: narrow.matches ? { l: 44, r: 8, t: 8, b: 44 } : { l: 60, r: 16, t: 8, b: 48 },
        hoverlabel: { bgcolor: theme.panel, bordercolor: theme.grid, align: "left",
          font: { family: fonts, size: 12.5, color: theme.ink } },
        modebar: { bgcolor: "rgba(0,0,0,0)", color: theme.muted, activecolor: theme.ink },
        legend: { orientation: "h", x: 0, y: 1, xanchor: "left", yanchor: "bottom",
          font: { size: narrow.matches ? 11 : 12.5 } },
      },
    };
  }

  const CONFIG = {
    responsive: true, displaylogo: false, displayModeBar: touch ? false : "hover",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  };
  let specs, template;

  function look() {
    const theme = dark.matches && !printing ? themes.dark : themes.light;
    specs = specsOf(theme);
    template = templateOf(theme);
  }

  function draw(key) {
    const { data, layout, height } = specs[key][chosen[key] || 0];
    const size = printing ? { height, width: 680 } : { height };
    return window.Plotly.react(`plot-${key}`, data, { ...layout, ...size, template }, CONFIG);
  }

  // One after the other: the page stays quick to scroll, and its top is there first.
  async function drawAll() {
    look();
    for (const key of Object.keys(pictures)) {
      await draw(key);
      await new Promise((resume) => { setTimeout(resume); });
    }
  }

  for (const button of document.querySelectorAll(".buttons button")) {
    button.addEventListener("click", () => {
      for (const other of button.parentElement.children) {
        other.setAttribute("aria-pressed", String(other === button));
      }
      chosen[button.dataset.picture] = Number(button.dataset.variant);
      draw(button.dataset.picture);
    });
  }
  dark.addEventListener("change", drawAll);
  narrow.addEventListener("change", drawAll);
  window.addEventListener("beforeprint", () => {
    printing = true;
    document.querySelectorAll("details").forEach((entry) => entry.setAttribute("open", ""));
    look();
    Object.keys(pictures).forEach(draw);  // the printer does not wait
  });
  window.addEventListener("afterprint", () => {
    printing = false;
    drawAll();
  });
  drawAll().then(() => { document.documentElement.dataset.drawn = Object.keys(pictures).length; });
})();
