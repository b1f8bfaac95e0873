// What the pointer does on a chart: it shows a step, and zooms by dragging.

/** The parts of a picture that `followPointer` works on, in the order of painting. */
function pointerParts(box) {
  return [
    svg("g", { class: "crosshair" }),
    svg("rect", { class: "drag", y: box.top, height: box.bottom - box.top, width: 0 }),
    svg("rect", { class: "catcher", ...rectOf(box) }),
  ];
}

/**
 * `drawing` has the picture, its box and x, the scale of steps. `hover` is told where the pointer is, `leave` that it
 * is gone, `zoom` the steps between which it was dragged, or null where all are wanted.
 */
function followPointer(drawing, { hover, leave, zoom }) {
  const { picture, box, x } = drawing;
  const catcher = picture.querySelector(".catcher");
  const drag = picture.querySelector(".drag");
  let start = null;
  const place = (event) => event.clientX - picture.getBoundingClientRect().left;
  const sorted = (event) => [start, place(event)].sort((one, other) => one - other);
  catcher.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    start = place(event);
    catcher.setPointerCapture(event.pointerId);
  });
  catcher.addEventListener("pointermove", (event) => {
    hover(place(event));
    if (start === null) return;
    const [left, right] = sorted(event);
    drag.setAttribute("x", Math.max(left, box.left));
    drag.setAttribute("width", Math.max(0, Math.min(right, box.right) - Math.max(left, box.left)));
  });
  catcher.addEventListener("pointerup", (event) => {
    const edges = start === null ? null : sorted(event);
    start = null;
    drag.setAttribute("width", 0);
    if (edges !== null && edges[1] - edges[0] >= 6) zoom(edges.map((edge) => x.invert(edge)));
  });
  catcher.addEventListener("pointerleave", leave);
  catcher.addEventListener("dblclick", () => zoom(null));
}

/** Puts a tooltip beside a place of a chart, on the side where there is room. */
function placeTooltip(tooltip, x, width) {
  const left = x > width / 2 ? x - tooltip.offsetWidth - 14 : x + 14;
  tooltip.style.left = `${Math.max(0, Math.min(left, width - tooltip.offsetWidth))}px`;
}
