// Curves as arrays of numbers (NaN where there is none), and what is done to them before they are drawn.

function numbers(values) {
  return Float64Array.from(values, (value) => (value === null ? NaN : value));
}

const MOST_SMOOTHING = 100;

/** Half the window of the mean, in points: fine at the slider's low end, a quarter of the curve at its high end. */
function halfWindow(slider, points) {
  return Math.round((slider / MOST_SMOOTHING) ** 2 * (points / 8));
}

/** The mean over `half` points to each side, fewer at the ends. A trailing average would shift the curve. */
function smoothed(values, half) {
  if (half === 0) return values;
  const sums = new Float64Array(values.length + 1);
  const counts = new Float64Array(values.length + 1);
  values.forEach((value, i) => {
    const there = !Number.isNaN(value);
    sums[i + 1] = sums[i] + (there ? value : 0);
    counts[i + 1] = counts[i] + (there ? 1 : 0);
  });
  return values.map((value, i) => {
    const reach = Math.min(half, i, values.length - 1 - i);
    const [from, to] = [i - reach, i + reach + 1];
    return Number.isNaN(value) ? NaN : (sums[to] - sums[from]) / (counts[to] - counts[from]);
  });
}

/** The smallest and the largest of several curves between two places. */
function extent(curves, from, to) {
  let low = Infinity;
  let high = -Infinity;
  for (const values of curves) {
    for (let i = from; i < to; i++) {
      if (values[i] < low) low = values[i];
      if (values[i] > high) high = values[i];
    }
  }
  return low <= high ? [low, high] : null;
}

/** The first place whose step is not before `step`. */
function placeOf(steps, step) {
  let low = 0;
  let high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1;
    else high = middle;
  }
  return low;
}

function nearestPlace(steps, step) {
  const after = Math.min(placeOf(steps, step), steps.length - 1);
  const before = Math.max(0, after - 1);
  return step - steps[before] < steps[after] - step ? before : after;
}

/**
 * The places to draw: all of them while there is room, otherwise the first, lowest, highest and last of each pixel
 * column and one place of each gap, which looks the same and is as many points as the screen can show.
 */
function drawnPlaces(values, { from, to, columns }) {
  const places = [];
  if (columns === null) {
    for (let i = from; i < to; i++) places.push(i);
    return places;
  }
  let i = from;
  while (i < to) {
    const column = columns[i];
    let [first, low, high, last, gap] = [-1, -1, -1, -1, -1];
    for (; i < to && columns[i] === column; i++) {
      if (Number.isNaN(values[i])) {
        gap = i;
        continue;
      }
      if (first < 0) first = low = high = i;
      if (values[i] < values[low]) low = i;
      if (values[i] > values[high]) high = i;
      last = i;
    }
    let before = -1;
    for (const place of [first, low, high, last, gap].sort((left, right) => left - right)) {
      if (place > before) places.push(place);
      before = place;
    }
  }
  return places;
}

/** The pixel column of every place, or null where there is room for each point. */
function columnsOf(steps, x, from, to, width) {
  return to - from <= 2 * width ? null : Int32Array.from(steps, (step) => Math.floor(x(step)));
}

/** Round numbers that cover a range. */
function ticks([low, high], wanted) {
  const rough = high / wanted - low / wanted;
  if (!(rough > 0)) return [low];
  const unit = 10 ** Math.floor(Math.log10(rough));
  const size = unit * ([1, 2, 5].find((factor) => factor * unit >= rough) ?? 10);
  // A range of the smallest numbers there are has no room for marks.
  if (!(size > 0)) return [low];
  const first = Math.ceil(low / size - 1e-9);
  const found = [];
  // Counted: among the largest whole numbers one more is the same number.
  for (let n = 0; n <= 4 * wanted && first + n <= high / size + 1e-9; n++) found.push((first + n) * size);
  return found;
}

/** Powers of ten, and 2 and 5 times them where there are few. */
function logTicks([low, high]) {
  const decades = Math.log10(high) - Math.log10(low);
  if (decades < 0.7) return ticks([low, high], 4);
  const factors = decades < 3 ? [1, 2, 5] : [1];
  const stride = Math.max(1, Math.ceil(decades / 8));
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += stride) {
    for (const factor of factors) {
      const value = factor * 10 ** power;
      if (value >= low && value <= high) found.push(value);
    }
  }
  return found;
}
