"use strict";
// Draws what /dashboard/data says, once a second. Everything that is text comes in as text, never as markup.
const SPANS_MIN = [1, 2, 5], WIDTH = 600, HEIGHT = 170, LEFT = 48, TOP = 12, BOTTOM = 26;
const GAP_S = 2;  // what came longer ago than this is not joined to what came after it, and is not said to be now
const CHARTS = [
  {title: "Time to first token, ms", lines: ["ttft_ms_p50", "ttft_ms_p95"], names: ["p50", "p95"], twin: "ttft_ms"},
  {title: "Between tokens, ms", lines: ["itl_ms_p50", "itl_ms_p95"], names: ["p50", "p95"], twin: "itl_ms"},
  {title: "Output tokens per second", lines: ["tokens_per_s"], names: ["tokens"], rate: true, twin: "tokens_per_s"},
  {title: "Requests per second", lines: ["requests_per_s", "failed_per_s"], names: ["ended", "failed"], rate: true, twin: "requests_per_s"},
];
const at = (id) => document.getElementById(id);
const round = (value) => value >= 100 ? Math.round(value) : Math.round(value * 10) / 10;

function make(tag, text, attributes = {}, svg = false) {
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  if (text !== null && text !== undefined) node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

const axisY = (share) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - share);

// The next of 1, 2, 5, 10, 20, ...
function above(value) {
  const unit = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  return unit * [1, 2, 5, 10].find((times) => times * unit >= value);
}

// Seconds in which nothing happened are not told: a rate was 0 in them.
function filled(series) {
  const made = [];
  for (const [s, value] of series) {
    if (made.length && s - made[made.length - 1][0] > 1.5) made.push([made[made.length - 1][0] + 1, 0], [s - 1, 0]);
    made.push([s, value]);
  }
  const last = made[made.length - 1];
  if (last && last[0] < -GAP_S) made.push([last[0] + 1, 0], [-1, 0]);
  return made;
}

function pieces(series) {
  const made = [];
  series.forEach((point, n) => {
    if (n === 0 || point[0] - series[n - 1][0] > GAP_S) made.push([]);
    made[made.length - 1].push(point);
  });
  return made.map((piece) => piece.length > 1 ? piece : [piece[0], piece[0]]);  // one point is a dot
}

// Minutes that the charts show: no more than there is to see.
function spanOf(data) {
  const oldest = Math.max(0, ...Object.values(data.measured).map((series) => series.length ? -series[0][0] : 0));
  return SPANS_MIN.find((minutes) => 60 * minutes >= oldest) || SPANS_MIN[SPANS_MIN.length - 1];
}

function chart(spec, data) {
  const minutes = spanOf(data), axisX = (s) => LEFT + (WIDTH - LEFT) * (1 + s / (60 * minutes));
  const join = spec.rate ? (series) => [filled(series)] : pieces;
  const lines = spec.lines.map((name, n) => ({name: spec.names[n], series: data.measured[name] || [], style: `l${n}`, key: `k${n}`, join}));
  const twin = data.predicted[spec.twin];
  if (twin) lines.push({name: "predicted p50", series: twin, style: "l2 dashed", key: "k2", join: pieces});
  const top = above(Math.max(1, ...lines.flatMap((line) => line.series.map((point) => point[1]))));
  const svg = make("svg", null, {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": spec.title}, true);
  for (const share of [0, 0.5, 1]) {
    const y = axisY(share);
    svg.append(make("line", null, {x1: LEFT, x2: WIDTH, y1: y, y2: y, class: "rule"}, true));
    svg.append(make("text", round(share * top), {x: LEFT - 6, y: y + 4, "text-anchor": "end"}, true));
  }
  svg.append(make("text", `${minutes} min ago`, {x: LEFT, y: HEIGHT - 8}, true));
  svg.append(make("text", "now", {x: WIDTH, y: HEIGHT - 8, "text-anchor": "end"}, true));
  for (const line of lines) for (const piece of line.join(line.series)) {
    const points = piece.map(([s, value]) => `${axisX(s).toFixed(1)},${axisY(value / top).toFixed(1)}`).join(" ");
    svg.append(make("polyline", null, {points, class: line.style}, true));
  }
  const legend = make("div", null, {class: "legend"});
  for (const line of lines) {
    const last = line.series[line.series.length - 1];
    const now = last && last[0] >= -GAP_S ? round(last[1]) : spec.rate ? 0 : "–";
    legend.append(make("i", null, {class: line.key}), `${line.name} ${now}`);
  }
  const figure = make("figure");
  figure.append(make("h3", spec.title), svg, legend);
  return figure;
}

function table(node, heads, rows) {
  const head = make("tr");
  head.append(...heads.map((name) => make("th", name)));
  const body = rows.map((cells) => {
    const row = make("tr");
    row.append(...cells.map((cell) => {
      const td = make("td", cell instanceof Node ? null : cell ?? "–");
      if (cell instanceof Node) td.append(cell);
      return td;
    }));
    return row;
  });
  node.replaceChildren(head, ...body);
}

function share(value) {
  if (value === null) return "–";
  const box = make("span");
  box.append(make("meter", null, {value, max: 1}), ` ${Math.round(100 * value)} %`);
  return box;
}

function told(shadow) {
  if (!shadow) return "";
  if (!shadow.up) return `The twin beside it has ended (${shadow.why}): nothing is predicted.`;
  return `The twin beside it has predicted ${shadow.compared} requests, and is ${shadow.delay_s} s behind now.`;
}

function draw(data) {
  at("state").textContent = data.status;
  at("state").className = `badge ${data.status === "ready" ? "good" : "bad"}`;
  at("missing").textContent = data.missing.join("; ");
  const sum = (name) => data.worker_list.reduce((total, worker) => total + (worker[name] || 0), 0);
  const tiles = {"ready workers": `${data.workers.ready} of ${data.workers.total}`, "open requests": data.open_requests,
    "running": sum("running"), "waiting in engines": sum("waiting"), "models": data.models.join(", ") || "none"};
  if (data.shadow) {
    for (const [name, metric] of [["TTFT", "ttft"], ["ITL", "itl"], ["end to end", "e2e"]]) {
      tiles[`${name}, predicted / measured`] = data.shadow.drift[metric]?.toFixed(2) ?? "–";
    }
  }
  at("shadow").textContent = told(data.shadow);
  at("tiles").replaceChildren(...Object.entries(tiles).map(([name, value]) => {
    const tile = make("div", null, {class: "tile"});
    tile.append(make("b", value), make("span", name));
    return tile;
  }));
  at("charts").replaceChildren(...CHARTS.map((spec) => chart(spec, data)));
  table(at("workers"), ["worker", "role", "state", "in flight", "running", "waiting", "KV in use", "cached blocks"],
    data.worker_list.map((one) => [one.name, one.role, one.state, one.in_flight, one.running, one.waiting, share(one.kv_share), one.cached_blocks]));
  const heads = [...new Set(data.decisions.flatMap(Object.keys))];
  table(at("decisions"), heads, data.decisions.map((one) => heads.map((name) => {
    const value = one[name];
    if (typeof value === "number" && !Number.isInteger(value)) return value.toFixed(3);
    return value !== null && typeof value === "object" ? JSON.stringify(value) : value;
  })));
}

async function refresh() {
  const key = sessionStorage.getItem("key");
  try {
    const answer = await fetch("/dashboard/data", {headers: key ? {authorization: `Bearer ${key}`} : {}});
    at("key").hidden = answer.status !== 401 && answer.status !== 403;
    if (answer.ok) draw(await answer.json());
    else { at("state").textContent = `no data: ${answer.status}`; at("state").className = "badge bad"; }
  } catch {
    at("state").textContent = "not reachable";
    at("state").className = "badge bad";
  }
  setTimeout(refresh, 1000);
}

at("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", new FormData(event.target).get("key"));
  event.target.reset();
});
refresh();
