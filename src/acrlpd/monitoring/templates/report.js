"use strict";
(() => {
  const { Chart, formatStep, htmlNode, legend, redraw, setRange } = charts;
  const data = JSON.parse(document.getElementById("report-data").textContent);

  // -- learning curves -------------------------------------------------------------------------------------

  const DASHES = ["", "dashed", "dotted"];
  // What all learning curves share: the range of steps in view, smoothing, the scale.
  const shared = { charts: [], range: null, smoothing: 0, log: false, name: "curves" };

  function buildCurves(host) {
    const several = data.runs.length > 1;
    const last = Math.max(...data.runs.map((run) => run.last_step));
    const only = several ? { anomalies: [], boundaries: [] } : data.runs[0];
    for (const group of data.curves.groups) {
      const section = htmlNode(host, "details", "group");
      section.open = true;
      htmlNode(section, "summary", "", group.title);
      const grid = htmlNode(section, "div", "grid");
      for (const chart of group.charts) {
        const card = htmlNode(grid, "figure", "card chart-card");
        const caption = htmlNode(card, "figcaption");
        htmlNode(caption, "span", "chart-title", chart.title);
        if (chart.note) htmlNode(caption, "span", "chart-note", chart.note);
        const averaged = new Set(chart.means.flatMap((mean) => mean.runs));
        const lines = chart.lines.map((line) => ({
          ...line,
          ...(averaged.has(line.run) ? { kind: "thin", low: null, high: null } : { kind: line.points ? "points" : "line" }),
          x: data.curves.steps[line.x],
          color: several ? data.runs[line.run].color % 8 : line.metric,
          dash: several ? DASHES[line.metric] : "",
          name: several ? `${data.runs[line.run].name}${chart.metrics.length > 1 ? " " + line.name : ""}` : line.name,
        }));
        for (const mean of chart.means) {
          lines.push({
            ...mean, kind: "mean", x: data.curves.steps[mean.x], dash: DASHES[mean.metric], color: colorOfMean(mean),
            name: `mean of ${mean.group}${chart.metrics.length > 1 ? " " + mean.name : ""}`,
          });
        }
        if (chart.metrics.length > 1) {
          legend(card, chart.metrics.map((name, i) => ({ name, color: several ? 8 : i, dash: several ? DASHES[i] : "" })));
        }
        const spec = {
          label: chart.title, extent: [0, last], panels: [{ height: 150, lines, unit: chart.share ? "share" : "" }],
          spans: only.anomalies, boundaries: only.boundaries,
        };
        new Chart(htmlNode(card, "div", "plot"), spec, shared);
      }
    }
    bindControls();
  }

  // The colour of the seeds; black or white where every seed has a colour of its own.
  function colorOfMean(mean) {
    const colors = new Set(mean.runs.map((run) => data.runs[run].color));
    return colors.size === 1 ? [...colors][0] % 8 : 9;
  }

  function bindControls() {
    const smoothing = document.getElementById("smoothing");
    const most = Math.max(0, ...data.curves.groups.flatMap((g) => g.charts.flatMap((c) => c.lines.map((l) => l.y.length))));
    smoothing.value = most > 150 ? 0.6 : 0;
    shared.smoothing = Number(smoothing.value);
    const show = () => { document.getElementById("smoothing-value").textContent = Number(smoothing.value).toFixed(2); };
    show();
    smoothing.addEventListener("input", () => {
      shared.smoothing = Number(smoothing.value);
      show();
      redraw(shared);
    });
    document.getElementById("log-scale").addEventListener("change", (event) => {
      shared.log = event.target.checked;
      redraw(shared);
    });
    const reset = document.getElementById("reset-zoom");
    reset.addEventListener("click", () => setRange(shared, null));
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") setRange(shared, null); });
    shared.onRange = (range) => {
      reset.disabled = range === null;
      reset.textContent = range ? `steps ${formatStep(Math.round(range[0]))} to ${formatStep(Math.round(range[1]))}: show all` : "all steps";
    };
    shared.onRange(null);
  }

  // Charts that are drawn together, apart from the learning curves.
  const chartGroups = [];

  // -- episodes ----------------------------------------------------------------------------------------------

  function buildEpisode(host, episode) {
    const own = { charts: [], range: null, smoothing: 0, log: false, name: `episode-${chartGroups.length}` };
    chartGroups.push(own);
    const x = episode.chunk_steps;
    const values = [{
      x, y: episode.q, low: episode.q_low, high: episode.q_high, kind: "line", dots: true, color: 0, name: "Q of the chosen chunk",
    }];
    if (episode.q_mean) values.push({ x, y: episode.q_mean, kind: "line", color: 8, dash: "dashed", name: "mean of the candidates" });
    if (episode.returns) values.push({ x, y: episode.returns, kind: "line", color: 1, dash: "dashed", name: "return that followed" });
    const panels = [{ title: "Q", height: 170, lines: values, plain: true }];
    if (episode.advantage) {
      panels.push({ title: "advantage of the choice", height: 64, zero: true, plain: true, lines: [{ x, y: episode.advantage, kind: "steps", color: 2, name: "advantage" }] });
    }
    panels.push({
      title: "reward", height: 46, zero: true, plain: true,
      lines: [{ x: episode.rewards.map((_, i) => i), y: episode.rewards, kind: "steps", color: 3, name: "reward" }],
    });
    legend(host, values.map((line) => ({ name: line.name, color: line.color, dash: line.dash })).concat(
      episode.q_low ? [{ name: "from the worst to the best candidate", color: 0, dash: "block" }] : []));
    const spec = { label: `Episode ${episode.seed}`, extent: [0, episode.rewards.length], panels, strip: episode.strip };
    new Chart(htmlNode(host, "div", "plot"), spec, own);
  }

  // -- chunks of held-out episodes ---------------------------------------------------------------------------

  function buildChunks(host, windows) {
    const own = { charts: [], range: null, smoothing: 0, log: false, name: `chunks-${chartGroups.length}` };
    chartGroups.push(own);
    const kinds = [
      { key: "logged", name: "logged", color: 8 },
      { key: "sample", name: "policy", color: 0 },
      { key: "best_of_n", name: "best-of-N", color: 1, dash: "dashed" },
    ].filter((kind) => windows.some((window) => window[kind.key]));
    const panels = windows.map((window) => ({
      title: window.title, height: 70, plain: true,
      lines: kinds.map((kind) => ({ ...kind, kind: "line", x: window.logged.map((_, i) => i), y: window[kind.key] })),
    }));
    legend(host, kinds);
    const last = Math.max(1, ...windows.map((window) => window.logged.length - 1));
    new Chart(htmlNode(host, "div", "plot"), { label: "Chunks of held-out episodes", extent: [0, last], panels }, own);
  }

  // -- theme ---------------------------------------------------------------------------------------------------

  function bindTheme() {
    const root = document.documentElement;
    const isDark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
    document.getElementById("theme").addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; });
  }

  bindTheme();
  buildCurves(document.getElementById("curves"));
  document.querySelectorAll("[data-episode]").forEach((host) => buildEpisode(host, data.episodes[Number(host.dataset.episode)]));
  document.querySelectorAll("[data-chunks]").forEach((host) => buildChunks(host, data.chunks[Number(host.dataset.chunks)]));
  const drawAll = () => [shared, ...chartGroups].forEach(redraw);
  drawAll();
  let waiting;
  window.addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(drawAll, 120); });
  document.querySelectorAll("details").forEach((details) => details.addEventListener("toggle", () => { if (details.open) drawAll(); }));
  document.body.dataset.ready = "true";
})();
