"use strict";
// Line charts by hand: zoom by dragging, a read-out that follows the pointer, panels above each other.
const charts = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const MARGIN = { left: 54, right: 12, bottom: 22 };

  // -- small things ---------------------------------------------------------------------------------

  function svgNode(parent, tag, attributes, text) {
    const node = document.createElementNS(SVG, tag);
    for (const name in attributes) node.setAttribute(name, attributes[name]);
    if (text !== undefined) node.textContent = text;
    parent.appendChild(node);
    return node;
  }

  function htmlNode(parent, tag, className, text) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    parent.appendChild(node);
    return node;
  }

  function format(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size >= 1e6 || size < 1e-3)) return value.toExponential(2).replace("e+", "e");
    return String(Number(value.toPrecision(4)));
  }

  function formatStep(value) {
    if (Math.abs(value) >= 1e6) return Number((value / 1e6).toPrecision(4)) + "M";
    if (Math.abs(value) >= 1e4) return Number((value / 1e3).toPrecision(4)) + "k";
    return String(Number(value.toPrecision(6)));
  }

  function ticks(low, high, count) {
    const raw = (high - low) / Math.max(count, 1);
    const power = Math.pow(10, Math.floor(Math.log10(raw)));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999);
    const result = [];
    for (let i = Math.ceil(low / step - 1e-9); i <= high / step + 1e-9; i++) result.push(Number((i * step).toPrecision(12)));
    return result;
  }

  function logTicks(low, high) {
    const result = [];
    const factors = Math.log10(high / low) < 2.5 ? [1, 2, 5] : [1];
    for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high); e++) {
      for (const factor of factors) {
        const value = factor * Math.pow(10, e);
        if (value >= low && value <= high) result.push(value);
      }
    }
    const every = Math.ceil(result.length / 6);
    return result.filter((_, i) => i % every === 0);
  }

  // Index of the element of a rising list that is nearest to value.
  function nearest(list, value) {
    let low = 0, high = list.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (list[middle] <= value) low = middle; else high = middle;
    }
    return Math.abs(list[high] - value) < Math.abs(list[low] - value) ? high : low;
  }

  // Moving average with exponential weights, corrected for its start.
  function smooth(values, weight) {
    if (!weight) return values;
    let sum = 0, norm = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = weight * sum + (1 - weight) * value;
      norm = weight * norm + (1 - weight);
      return sum / norm;
    });
  }

  // -- a chart: one or more panels above each other with one time axis ---------------------------------

  class Chart {
    // spec: {label, panels: [{title, height, lines, zero, plain, unit}], extent: [first, last], spans, boundaries, strip}
    // line: {x, y, low, high, color, dash, name, kind: "line" | "points" | "steps" | "mean" | "thin"}
    constructor(host, spec, shared) {
      this.host = host;
      this.spec = spec;
      this.shared = shared; // {name, range, smoothing, log} and `charts`, which are drawn together
      shared.charts.push(this);
      this.svg = svgNode(host, "svg", { class: "chart", role: "img", "aria-label": spec.label });
      this.svg.addEventListener("pointermove", (event) => this.move(event));
      this.svg.addEventListener("pointerleave", () => this.leave());
      this.svg.addEventListener("pointerdown", (event) => this.press(event));
      this.svg.addEventListener("pointerup", (event) => this.release(event));
      this.svg.addEventListener("dblclick", () => setRange(this.shared, null));
    }

    draw() {
      const width = Math.max(this.host.clientWidth, 200);
      const stripHeight = this.spec.strip ? this.spec.strip.height * (width - MARGIN.left - MARGIN.right) / this.spec.strip.width : 0;
      const room = (panel) => panel.height + (panel.title ? 24 : 14);
      const height = 6 + stripHeight + this.spec.panels.reduce((sum, panel) => sum + room(panel), 0) + MARGIN.bottom;
      this.svg.setAttribute("width", width);
      this.svg.setAttribute("height", height);
      this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      this.svg.replaceChildren();
      this.left = MARGIN.left;
      this.right = width - MARGIN.right;
      const [first, last] = this.shared.range || this.spec.extent;
      this.x = (step) => this.left + (this.right - this.left) * (step - first) / Math.max(last - first, 1e-9);
      this.step = (x) => first + (last - first) * (x - this.left) / (this.right - this.left);
      let top = 6;
      if (this.spec.strip) {
        svgNode(this.svg, "image", {
          href: this.spec.strip.source, x: this.left, y: top, width: this.right - this.left, height: stripHeight,
          preserveAspectRatio: "none", class: "strip",
        });
        top += stripHeight;
      }
      this.top = 6;
      for (const panel of this.spec.panels) {
        top += room(panel) - panel.height;
        this.drawPanel(panel, top, first, last);
        top += panel.height;
      }
      this.bottom = top;
      this.drawSteps(first, last);
      this.cross = svgNode(this.svg, "line", { class: "cross", y1: this.top, y2: this.bottom, visibility: "hidden" });
      this.brush = svgNode(this.svg, "rect", { class: "brush", y: this.top, height: this.bottom - this.top, visibility: "hidden" });
    }

    drawPanel(panel, top, first, last) {
      const smoothing = panel.plain ? 0 : this.shared.smoothing;
      const shown = panel.lines.map((line) => ({ ...line, mean: line.kind === "line" ? smooth(line.y, smoothing) : line.y }));
      const scale = this.scale(panel, shown, first, last, top);
      const clip = `clip-${Math.round(top)}-${this.shared.charts.indexOf(this)}-${this.shared.name}`;
      svgNode(svgNode(this.svg, "clipPath", { id: clip }), "rect", { x: this.left, y: top - 3, width: this.right - this.left, height: panel.height + 6 });
      for (const value of scale.ticks) {
        const y = scale.y(value);
        svgNode(this.svg, "line", { class: "gridline", x1: this.left, x2: this.right, y1: y, y2: y });
        svgNode(this.svg, "text", { class: "tick", x: this.left - 7, y: y + 3.5, "text-anchor": "end" }, panel.unit === "share" ? `${Math.round(100 * value)} %` : format(value));
      }
      const plot = svgNode(this.svg, "g", { "clip-path": `url(#${clip})` });
      for (const span of this.spec.spans || []) {
        const x = this.x(span.first);
        svgNode(plot, "rect", { class: `span ${span.severity}`, x, y: top - 3, width: Math.max(this.x(span.last) - x, 2), height: panel.height + 6 });
      }
      for (const boundary of this.spec.boundaries || []) {
        svgNode(plot, "line", { class: "boundary", x1: this.x(boundary.step), x2: this.x(boundary.step), y1: top, y2: top + panel.height });
        svgNode(plot, "text", { class: "boundary-label", x: this.x(boundary.step) + 4, y: top + 9 }, boundary.name);
      }
      for (const line of shown) this.drawLine(plot, line, scale, smoothing, first, last);
      if (panel.title) svgNode(this.svg, "text", { class: "panel-title", x: this.left, y: top - 7 }, panel.title);
    }

    scale(panel, lines, first, last, top) {
      let low = Infinity, high = -Infinity, positive = true;
      for (const line of lines) {
        const ends = line.kind === "line" && !panel.plain ? [line.mean] : [line.mean, line.low, line.high];
        for (let i = 0; i < line.x.length; i++) {
          if (line.x[i] < first || line.x[i] > last) continue;
          for (const values of ends) {
            if (!values || values[i] === null) continue;
            low = Math.min(low, values[i]);
            high = Math.max(high, values[i]);
            positive = positive && values[i] > 0;
          }
        }
      }
      for (const line of lines) {
        if (line.mean === line.y) continue;
        // Of the unsmoothed values all but the outermost are to be seen.
        const values = line.y.filter((v, i) => v !== null && line.x[i] >= first && line.x[i] <= last).sort((a, b) => a - b);
        if (!values.length) continue;
        low = Math.min(low, values[Math.floor(0.02 * (values.length - 1))]);
        high = Math.max(high, values[Math.ceil(0.98 * (values.length - 1))]);
        positive = positive && values[0] > 0;
      }
      if (low > high) { low = 0; high = 1; }
      if (panel.zero) { low = Math.min(low, 0); high = Math.max(high, 0); }
      if (panel.unit === "share") { low = 0; high = 1; }
      const bottom = top + panel.height;
      if (this.shared.log && positive && !panel.zero && panel.unit !== "share") {
        const room = Math.pow(high / low, 0.06) || 1.1;
        low /= room * 1.0001; high *= room * 1.0001;
        const span = Math.log(high / low);
        return { y: (v) => bottom - panel.height * Math.log(Math.max(v, low * 1e-3) / low) / span, ticks: logTicks(low, high) };
      }
      if (high === low) { const room = Math.abs(high) * 0.1 || 1; low -= room; high += room; }
      else if (panel.unit !== "share") {
        const room = 0.07 * (high - low);
        if (!(panel.zero && low === 0)) low -= room;
        if (!(panel.zero && high === 0)) high += room;
      }
      return { y: (v) => bottom - panel.height * (v - low) / (high - low), ticks: ticks(low, high, Math.max(panel.height / 34, 2.5)) };
    }

    drawLine(plot, line, scale, smoothing, first, last) {
      let from = 0, to = line.x.length;
      while (from + 1 < to && line.x[from + 1] < first) from++;
      while (to - 1 > from && line.x[to - 2] > last) to--;
      const point = (i, value) => `${this.x(line.x[i]).toFixed(1)} ${scale.y(value).toFixed(1)}`;
      const path = (values) => {
        let d = "", open = false;
        for (let i = from; i < to; i++) {
          if (values[i] === null) { open = false; continue; }
          d += (open ? "L" : "M") + point(i, values[i]);
          open = true;
        }
        return d;
      };
      if (line.kind === "steps") { this.drawStepArea(plot, line, scale); return; }
      if (line.low && line.kind === "points") {
        for (let i = from; i < to; i++) {
          if (line.low[i] === null || line.high[i] === null) continue;
          const x = this.x(line.x[i]);
          svgNode(plot, "line", { class: `interval c${line.color}`, x1: x, x2: x, y1: scale.y(line.low[i]), y2: scale.y(line.high[i]) });
        }
      } else if (line.low) {
        let d = "";
        const known = [];
        for (let i = from; i < to; i++) if (line.low[i] !== null && line.high[i] !== null) known.push(i);
        known.forEach((i, n) => { d += (n ? "L" : "M") + point(i, line.high[i]); });
        known.reverse().forEach((i) => { d += "L" + point(i, line.low[i]); });
        if (d) svgNode(plot, "path", { class: `band c${line.color}`, d: d + "Z" });
      }
      if (smoothing && line.kind === "line") svgNode(plot, "path", { class: `raw c${line.color}`, d: path(line.y) });
      svgNode(plot, "path", { class: `line c${line.color} ${line.dash || ""} ${line.kind}`, d: path(line.mean) });
      if (line.kind === "points" || line.kind === "mean" || line.dots || to - from < 2) {
        for (let i = from; i < to; i++) {
          if (line.y[i] !== null) svgNode(plot, "circle", { class: `point c${line.color}`, cx: this.x(line.x[i]), cy: scale.y(line.y[i]), r: 2.6 });
        }
      }
    }

    // Values that hold until the next one, as an area from zero.
    drawStepArea(plot, line, scale) {
      let d = `M${this.x(line.x[0])} ${scale.y(0)}`;
      for (let i = 0; i < line.x.length; i++) {
        const end = i + 1 < line.x.length ? line.x[i + 1] : this.spec.extent[1];
        const y = scale.y(line.y[i] === null ? 0 : line.y[i]).toFixed(1);
        d += `L${this.x(line.x[i]).toFixed(1)} ${y}L${this.x(end).toFixed(1)} ${y}`;
      }
      d += `L${this.x(this.spec.extent[1])} ${scale.y(0)}Z`;
      svgNode(plot, "path", { class: `area c${line.color}`, d });
    }

    drawSteps(first, last) {
      svgNode(this.svg, "line", { class: "axis-line", x1: this.left, x2: this.right, y1: this.bottom, y2: this.bottom });
      const marks = ticks(first, last, (this.right - this.left) / 55);
      marks.forEach((value) => {
        const x = this.x(value);
        const anchor = x > this.right - 14 ? "end" : x < this.left + 8 ? "start" : "middle";
        svgNode(this.svg, "text", { class: "tick", x, y: this.bottom + 15, "text-anchor": anchor }, formatStep(value));
      });
    }

    position(event) {
      const x = event.clientX - this.svg.getBoundingClientRect().left;
      return Math.min(Math.max(x, this.left), this.right);
    }

    move(event) {
      const x = this.position(event);
      if (this.pressed !== undefined) {
        this.brush.setAttribute("x", Math.min(x, this.pressed));
        this.brush.setAttribute("width", Math.abs(x - this.pressed));
        this.brush.setAttribute("visibility", "visible");
      }
      const step = this.step(x);
      for (const chart of this.shared.charts) chart.showCross(step);
      showTooltip(event, this.readOut(step));
    }

    readOut(step) {
      const rows = [];
      let at = null;
      for (const panel of this.spec.panels) {
        for (const line of panel.lines) {
          if (!line.x.length) continue;
          // A value that holds for a while is the one that began last.
          let i = nearest(line.x, step);
          if (line.kind === "steps" && line.x[i] > step && i > 0) i--;
          if (at === null) at = line.x[i];
          const range = line.low && line.low[i] !== null ? `  ${format(line.low[i])} … ${format(line.high[i])}` : "";
          rows.push({ color: line.color, name: line.name, text: format(line.y[i]) + range });
        }
      }
      return { title: `step ${at === null ? "" : at.toLocaleString("en")}`, rows };
    }

    showCross(step) {
      const x = this.x(step);
      const inside = x >= this.left && x <= this.right;
      this.cross.setAttribute("x1", x);
      this.cross.setAttribute("x2", x);
      this.cross.setAttribute("visibility", inside ? "visible" : "hidden");
    }

    leave() {
      for (const chart of this.shared.charts) chart.cross.setAttribute("visibility", "hidden");
      tooltip.hidden = true;
    }

    press(event) {
      if (event.button !== 0) return;
      this.pressed = this.position(event);
      this.svg.setPointerCapture(event.pointerId);
    }

    release(event) {
      if (this.pressed === undefined) return;
      const ends = [this.pressed, this.position(event)].sort((a, b) => a - b);
      this.pressed = undefined;
      this.brush.setAttribute("visibility", "hidden");
      if (ends[1] - ends[0] > 6) setRange(this.shared, ends.map(this.step));
    }
  }

  function setRange(shared, range) {
    shared.range = range;
    redraw(shared);
    if (shared.onRange) shared.onRange(range);
  }

  // -- the read-out --------------------------------------------------------------------------------------

  const tooltip = htmlNode(document.body, "div", "tooltip");
  tooltip.hidden = true;

  function showTooltip(event, content) {
    tooltip.replaceChildren();
    htmlNode(tooltip, "div", "tooltip-title", content.title);
    for (const row of content.rows) {
      const line = htmlNode(tooltip, "div", "tooltip-row");
      htmlNode(line, "span", `swatch c${row.color}`);
      htmlNode(line, "span", "tooltip-name", row.name);
      htmlNode(line, "span", "tooltip-value", row.text);
    }
    tooltip.hidden = false;
    const box = tooltip.getBoundingClientRect();
    const right = event.clientX + 16 + box.width > window.innerWidth;
    tooltip.style.left = `${right ? event.clientX - box.width - 12 : event.clientX + 16}px`;
    tooltip.style.top = `${Math.min(event.clientY + 14, window.innerHeight - box.height - 8)}px`;
  }

  function legend(parent, entries) {
    const list = htmlNode(parent, "div", "legend");
    for (const entry of entries) {
      const item = htmlNode(list, "span", "legend-item");
      htmlNode(item, "span", `swatch c${entry.color} ${entry.dash || ""}`);
      htmlNode(item, "span", "", entry.name);
    }
  }

  function redraw(group) {
    group.charts.forEach((chart) => chart.draw());
  }

  return { Chart, formatStep, htmlNode, legend, redraw, setRange };
})();
