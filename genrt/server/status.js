"use strict";

const EVERY_MS = 1000;
let before = null;

const element = (id) => document.getElementById(id);
const show = (id, value) => { element(id).textContent = value; };
const number = (value, digits = 0) =>
  Number.isFinite(value) ? value.toLocaleString("en", { maximumFractionDigits: digits }) : "–";

function cell(row, ...children) {
  const made = document.createElement("td");
  made.append(...children);
  row.append(made);
}

function showInferences(inferences) {
  const rows = inferences.map((each) => {
    const row = document.createElement("tr");
    const meter = document.createElement("meter");
    meter.max = each.particles;
    meter.value = each.ess;
    meter.ariaLabel = "effective sample size";
    cell(row, String(each.number));
    cell(row, `${each.step} of ${each.max_steps} at most`);
    cell(row, `${each.unfinished} of ${each.particles}`);
    cell(row, meter, number(each.ess, 1));
    cell(row, each.log_evidence === null ? "–∞" : number(each.log_evidence, 2));
    return row;
  });
  if (!rows.length) {
    const row = document.createElement("tr");
    cell(row, "none is running");
    row.firstChild.colSpan = 5;
    rows.push(row);
  }
  element("inferences").replaceChildren(...rows);
}

function showStatus(status) {
  const { batcher, engine } = status.statistics;
  show("model", status.model);
  document.title = `${status.model} – genrt`;
  show("state", `up for ${number(status.uptime_seconds)} s`);
  show("serving", number(status.serving));
  for (const name of ["queued", "in_flight", "largest_flush", "cached"]) show(name, number(batcher[name]));
  show("flush", number(batcher.flushes ? engine.requests / batcher.flushes : NaN, 1));
  if (before !== null) {
    const seconds = status.uptime_seconds - before.uptime_seconds;
    const rate = (name) => (engine[name] - before.statistics.engine[name]) / seconds;
    // After a restart the engine counts from 0 again.
    if (rate("sampled_tokens") >= 0) show("tokens", number(rate("sampled_tokens")));
    if (rate("rows") >= 0) show("rows", number(rate("rows")));
  }
  before = status;
  showInferences(status.inferences);
}

async function poll() {
  try {
    const answer = await fetch("v1/status", { cache: "no-store" });
    if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
    showStatus(await answer.json());
    document.body.classList.remove("lost");
  } catch (error) {
    document.body.classList.add("lost");
    show("state", `lost: ${error.message}`);
    before = null;
  }
  setTimeout(poll, EVERY_MS);
}

poll();
