// SPDX-License-Identifier: Apache-2.0
// Draws the figures of a report with plotly.js, with the template of the reader's theme.
"use strict";
(function () {
  const { figures, templates } = JSON.parse(document.getElementById("pictures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const touch = window.matchMedia("(pointer: coarse)").matches;  // a finger that moves scrolls the page
  const config = {
    responsive: true, displaylogo: false, displayModeBar: touch ? false : "hover",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  };
  const chosen = {};
  let printing = false;

  function draw(key) {
    const { data, layout } = figures[key][chosen[key] || 0];
    const template = dark.matches && !printing ? templates.dark : templates.light;
    const look = { template, dragmode: touch ? false : "zoom", ...(printing && { width: 680 }) };
    return window.Plotly.react(`plot-${key}`, data, { ...layout, ...look }, config);
  }

  // One after the other: the page stays quick to scroll, and its top is there first.
  async function drawAll() {
    for (const key of Object.keys(figures)) {
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
  window.addEventListener("beforeprint", () => {
    printing = true;
    document.querySelectorAll("details").forEach((entry) => entry.setAttribute("open", ""));
    Object.keys(figures).forEach(draw);  // the printer does not wait
  });
  window.addEventListener("afterprint", () => {
    printing = false;
    drawAll();
  });
  drawAll().then(() => { document.documentElement.dataset.drawn = Object.keys(figures).length; });
})();
