// Shows the values nearest to the pointer in a chart's legend. The page is complete without it.
for (const figure of document.querySelectorAll("figure[data-near]")) {
  const near = JSON.parse(figure.dataset.near);
  const svg = figure.querySelector("svg");
  const cursor = svg.querySelector(".cursor");
  const outputs = figure.querySelectorAll(".legend output");
  const moment = figure.querySelector(".moment");
  const nearest = (xs, at) => {
    let low = 0, high = xs.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (xs[middle] < at) low = middle + 1; else high = middle;
    }
    return low > 0 && at - xs[low - 1] < xs[low] - at ? low - 1 : low;
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    near.s.forEach((series, index) => {
      outputs[index].textContent = series && series.x.length ? series.t[nearest(series.x, at)] : "";
    });
    let x = at;
    if (near.m && near.m.x.length) {
      const index = nearest(near.m.x, at);
      x = near.m.x[index];
      moment.textContent = "at " + near.m.t[index];
    }
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.style.visibility = "visible";
  });
  svg.addEventListener("pointerleave", () => {
    cursor.style.visibility = "hidden";
    outputs.forEach((output) => { output.textContent = ""; });
    if (moment) moment.textContent = "";
  });
}
