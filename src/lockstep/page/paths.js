// From values to places on the screen, and to the path data of lines and areas.

/** In halves: the difference of the largest numbers there are is no number. */
function linear([low, high], [from, to]) {
  const half = high / 2 - low / 2;
  const scale = (value) => from + ((value / 2 - low / 2) / (half || 0.5)) * (to - from);
  scale.invert = (place) => low + ((place - from) / (to - from)) * half * 2;
  return scale;
}

function logarithmic([low, high], range) {
  const inner = linear([Math.log10(low), Math.log10(high)], range);
  return (value) => (value > 0 ? inner(Math.log10(value)) : NaN);
}

function padded([low, high], part) {
  const room = (high / 2 - low / 2) * (2 * part) || Math.abs(high) * part || 1;
  return [Math.max(-Number.MAX_VALUE, low - room), Math.min(Number.MAX_VALUE, high + room)];
}

/** Path data of a line; a missing value breaks it, a lonely point becomes a dot. */
function linePath(values, frame) {
  let path = "";
  let run = 0;
  const close = () => (run === 1 ? "h0" : "");
  for (const i of frame.places(values)) {
    const y = frame.y(values[i]);
    if (Number.isNaN(y)) {
      path += close();
      run = 0;
      continue;
    }
    path += `${run === 0 ? "M" : "L"}${frame.x(i).toFixed(1)} ${y.toFixed(1)}`;
    run += 1;
  }
  return path + close();
}

/** Path data of the area between two curves. */
function areaPath(low, high, frame) {
  const above = frame.places(high).filter((i) => !Number.isNaN(high[i]));
  const below = frame
    .places(low)
    .filter((i) => !Number.isNaN(low[i]))
    .reverse();
  if (above.length === 0 || below.length === 0) return "";
  const point = (values) => (i) => {
    const y = frame.y(values[i]);
    return `${frame.x(i).toFixed(1)} ${(Number.isNaN(y) ? frame.floor : y).toFixed(1)}`;
  };
  return `M${[...above.map(point(high)), ...below.map(point(low))].join("L")}Z`;
}

function frameOf(state, steps, y, floor) {
  return { x: (i) => state.x(steps[i]), y, floor, places: (values) => drawnPlaces(values, state) };
}
