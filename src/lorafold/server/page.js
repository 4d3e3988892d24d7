"use strict";

const PERIOD_MS = 1000;
const HISTORY = 120;

const at = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en");
const rates = [];
let last = null;
let key = "";
let timer = 0;

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value;
  clearTimeout(timer);
  look();
});

async function look() {
  try {
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const response = await fetch("/status", { headers, cache: "no-store" });
    at("key-form").hidden = response.status !== 401;
    if (response.status === 401) {
      say(key ? "The API key is wrong." : "");
      return; // until a key is given
    }
    if (!response.ok) throw new Error(`the server answers ${response.status}`);
    say("");
    show(await response.json(), performance.now());
  } catch (error) {
    say(`The server cannot be reached: ${error.message}`);
  }
  timer = setTimeout(look, PERIOD_MS);
}

function say(text) {
  at("problem").textContent = text;
  at("problem").hidden = text === "";
}

function show(status, now) {
  at("numbers").hidden = false;
  at("model").textContent =
    `${status.model}, ${status.batching} batches, ` +
    `requests of up to ${number.format(status.max_length)} tokens`;
  const models = [status.base, ...status.adapters];
  const sum = (name) => models.reduce((total, model) => total + model[name], 0);
  if (last !== null) {
    const seconds = (now - last.now) / 1000;
    rates.push(Math.max(0, (status.answer_tokens - last.tokens) / seconds));
    if (rates.length > HISTORY) rates.shift();
  }
  last = { now, tokens: status.answer_tokens };
  at("rate").textContent = (rates.at(-1) ?? 0).toFixed(1);
  at("running").textContent = number.format(sum("running"));
  at("waiting").textContent = number.format(sum("waiting"));
  at("tokens").textContent = number.format(status.answer_tokens);
  at("evictions").textContent = number.format(status.evictions);
  draw();
  at("slots").replaceChildren(...slots(status));
  at("rows").replaceChildren(...models.map(row));
}

function draw() {
  const top = Math.max(1, ...rates);
  const points = rates.map((rate, index) => {
    const x = 600 - (rates.length - 1 - index) * (600 / (HISTORY - 1));
    return `${x.toFixed(1)},${(78 - (76 * rate) / top).toFixed(1)}`;
  });
  at("line").setAttribute("points", points.join(" "));
  const left = 600 - (rates.length - 1) * (600 / (HISTORY - 1));
  const area = rates.length ? [`${left.toFixed(1)},80`, ...points, "600.0,80"] : [];
  at("area").setAttribute("points", area.join(" "));
  at("peak").textContent = `peak ${Math.max(0, ...rates).toFixed(1)}`;
}

function slots(status) {
  return Array.from({ length: status.max_loras }, (_, slot) => {
    const item = document.createElement("li");
    const name = status.slots[slot];
    item.textContent = `${slot}: ${name ?? "empty"}`;
    item.classList.toggle("empty", name === undefined);
    return item;
  });
}

function row(model) {
  const line = document.createElement("tr");
  const cells = [model.name, model.slot ?? "", model.running, model.waiting, model.finished];
  for (const value of [...cells, model.answer_tokens]) {
    const cell = document.createElement("td");
    cell.textContent = typeof value === "number" ? number.format(value) : value;
    line.append(cell);
  }
  return line;
}

look();
