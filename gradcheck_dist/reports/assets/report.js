"use strict";
(function () {
  var wide = window.matchMedia("(min-width: 520px)");
  // Words beside figures are those of the page, on dark paper too.
  var soft = getComputedStyle(document.documentElement).getPropertyValue("--soft").trim();
  function draw(place) {
    var spec = JSON.parse(document.getElementById(place.dataset.figure).textContent);
    spec.layout.font.color = soft;
    if (!wide.matches) {
      spec.layout.margin = { l: 40, r: 8, t: 16, b: 40 };
      spec.layout.font.size = 10;
      spec.data.forEach(function (trace) {
        if (trace.type === "heatmap") { trace.showscale = false; }
      });
    }
    Plotly.newPlot(place, spec.data, spec.layout, { responsive: true, displaylogo: false, displayModeBar: false });
  }
  function all() {
    document.querySelectorAll(".plot").forEach(function (place) {
      try {
        draw(place);
      } catch (error) {
        place.textContent = "This figure could not be drawn: " + error.message;
      }
    });
    document.documentElement.dataset.drawn = "yes";
  }
  if (window.Plotly) { all(); } else {
    document.querySelectorAll(".plot").forEach(function (place) {
      place.textContent = "plotly.js was not found beside this file: figures are not drawn, the tables hold the numbers.";
    });
  }
})();
