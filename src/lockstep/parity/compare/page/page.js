// Puts the page together.

headline(document.getElementById("headline"));
const explorerRoot = document.getElementById("explorer");
if (DATA.metrics.length === 0) explorerRoot.remove();
metricTable(document.getElementById("table"), DATA.metrics.length === 0 ? null : makeExplorer(explorerRoot).choose);
throughput(document.getElementById("throughput"));
environment(document.getElementById("environment"));
samples(document.getElementById("samples"));
meaning(document.getElementById("meaning"));
