// The two curves of a metric, and how far they may lie apart.

function seriesOf(metric) {
  const a = numbers(metric.a);
  const b = numbers(metric.b);
  return { steps: Float64Array.from(DATA.steps[metric.steps]), a, b, repeats: metric.repeats.map(numbers) };
}

/** How far b may lie from a at each step; null for a metric without a bar. */
function toleranceOf(metric, a) {
  if (metric.bar_percent === null) return null;
  const part = metric.bar_percent / 100;
  return a.map((value) => (decidedByScaled(metric) ? part * Math.abs(value) : part));
}

/** The bar belongs to the absolute error unless the judge says that the scaled one decides. */
function decidedByScaled(metric) {
  return metric.scaled;
}

function minus(left, right) {
  return left.map((value, i) => value - right[i]);
}

function plus(left, right, sign = 1) {
  return left.map((value, i) => value + sign * right[i]);
}
