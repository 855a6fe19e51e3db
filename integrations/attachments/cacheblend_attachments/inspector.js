"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const SAYS = {
    computed: "computed",
    recomputed: "recomputed over its stored KV",
    encoded: "not stored: encoded first, and kept",
    device: "KV from the device",
    ram: "KV from RAM",
    disk: "KV from disk",
    head: "fixed head, KV stored",
    prefix: "KV from an earlier prompt",
  };
  const ORDER = Object.keys(SAYS);
  const WAITS = {
    queue: ["Queue", "waiting for the model"],
    open: ["Opening KV", "opening stored KV"],
    encode: ["Encoding", "encoding misses"],
  };
  const fateClass = (fate) => "f-" + (fate in SAYS ? fate : "remote");
  const sayFate = (fate) => SAYS[fate] || `KV from ${fate}`;

  // All text of prompts, answers and ids comes through here, and becomes text.
  function make(tag, name, text) {
    const made = document.createElement(tag);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;
    return made;
  }
  const many = (count, one, more) => `${count.toLocaleString("en")} ${count === 1 ? one : more || one + "s"}`;
  function seconds(s) {
    if (s === null) return "-";
    if (s < 0.01) return `${(1000 * s).toFixed(1)} ms`;
    return s < 1 ? `${(1000 * s).toFixed(0)} ms` : `${s.toFixed(s < 10 ? 2 : 1)} s`;
  }
  function bytes(size) {
    const units = ["B", "kB", "MB", "GB", "TB"];
    let power = 0;
    while (size >= 999.5 && power < units.length - 1) { size /= 1000; power += 1; }
    return `${power && size < 99.5 ? size.toFixed(1) : size.toFixed(0)} ${units[power]}`;
  }

  let view, fates, chunkOf, spans, pointed;

  function show(index) {
    view = data.views[index];
    fates = view.fates.flatMap(([fate, count]) => new Array(count).fill(fate));
    chunkOf = new Array(fates.length).fill(null);
    view.chunks.forEach((chunk, number) => chunkOf.fill(number, chunk.start, chunk.stop));
    pointed = undefined;
    [...at("switch").children].forEach((button, number) => button.setAttribute("aria-pressed", String(number === index)));
    head(); answer(index); figures(); legend(); prompt(); attention(); time();
    at("detail-text").replaceChildren("Point at a token to see what happened to it.");
  }

  const computedTokens = () => fates.filter((fate) => fate === "computed" || fate === "recomputed").length;
  const chunkName = (number) => view.chunks[number].id === null ? `chunk ${number + 1}` : view.chunks[number].id;

  function head() {
    const f = view.figures, count = f.hits + f.misses;
    at("headline").textContent =
      `First token after ${seconds(f.ttft_s)}; ${f.hits} of ${many(count, "chunk")} stored, ` +
      `${computedTokens().toLocaleString("en")} of ${many(f.prompt_tokens, "token")} computed` +
      (view.full ? " (full prefill)." : ".");
    const why = f.fallback_reason;
    at("why").hidden = !why;
    at("why").textContent = why ? `Prefilled in full: ${why}` : "";
  }

  function answer(index) {
    const last = view.chunks.length ? view.chunks[view.chunks.length - 1].stop : 0;
    const asked = data.tokens.slice(last).join("").trim();
    at("question").textContent = asked || "(the prompt ends with a chunk)";
    at("answer").replaceChildren(...view.answer.map((text, number) => {
      const token = make("span", data.differs === number ? "differs" : "", text);
      if (data.differs === number) token.title = "the first token that differs";
      return token;
    }));
    at("differs").hidden = data.views.length < 2;
    if (data.views.length < 2) return;
    const other = data.views[1 - index], n = data.differs;
    const word = (each) => n < each.answer.length ? JSON.stringify(each.answer[n]) : "the answer's end";
    at("differs").textContent = n === null
      ? "Both answers are the same, token by token."
      : `The answers differ from token ${n + 1} on: ${word(view)} here, ${word(other)} in the other one.`;
  }

  function figures() {
    const f = view.figures, rows = [];
    const tile = (name, value, more) => {
      const box = make("div"), value_ = make("dd", "", value);
      if (more) value_.append(make("small", "", more));
      box.append(make("dt", "", name), value_);
      rows.push(box);
    };
    const full = view === data.views[0] && data.views.length > 1 ? data.views[1].figures.ttft_s : null;
    tile("First token", seconds(f.ttft_s), full === null ? "" : `full prefill: ${seconds(full)} (${(full / f.ttft_s).toFixed(1)}x)`);
    tile("Chunks stored", `${f.hits} of ${f.hits + f.misses}`, f.misses ? `${many(f.misses, "miss", "misses")}` : "");
    tile("Computed", many(computedTokens(), "token"), `of ${f.prompt_tokens.toLocaleString("en")} in the prompt`);
    tile("Recomputed", many(f.recomputed_tokens, "token"), `of ${f.context_tokens.toLocaleString("en")} in chunks${f.recomputed_tokens ? ` (${f.selector})` : ""}`);
    tile("KV loaded", bytes(f.load_bytes), f.load_s ? `waited ${seconds(f.load_s)} for it` : "");
    tile("Answer", many(f.output_tokens, "token"), f.tpot_s === null ? "" : `${seconds(f.tpot_s)} each after the first`);
    at("figures").replaceChildren(...rows);
  }

  function legend() {
    const counts = new Map();
    fates.forEach((fate) => counts.set(fate, (counts.get(fate) || 0) + 1));
    const rank = (fate) => (ORDER.indexOf(fate) + ORDER.length + 1) % (ORDER.length + 1);
    at("legend").replaceChildren(...[...counts].sort((a, b) => rank(a[0]) - rank(b[0])).map(([fate, count]) => {
      const item = make("li");
      item.append(make("span", `key ${fateClass(fate)}`), `${sayFate(fate)} (${count.toLocaleString("en")})`);
      return item;
    }));
  }

  function tokens(start, stop) {
    const rows = make("div", "rows");
    for (let row = start; row < stop; row += 1) {
      const text = data.tokens[row], token = make("span", `t ${fateClass(fates[row])}`, text);
      if (!text) token.classList.add("part");
      else if (/^\s*\n\s*$/.test(text)) token.classList.add("end");
      token.dataset.row = row;
      spans[row] = token;
      rows.append(token);
    }
    return rows;
  }

  function prompt() {
    const parts = [];
    let row = 0;
    spans = new Array(fates.length);
    const text = (stop) => {
      if (stop <= row) return;
      const rows = tokens(row, stop);
      rows.classList.add("between");
      parts.push(rows);
    };
    view.chunks.forEach((chunk, number) => {
      text(chunk.start);
      const block = make("section", "chunk"), top = make("header");
      block.tabIndex = 0;
      block.dataset.chunk = number;
      block.setAttribute("aria-label", `${chunkName(number)}: ${chunkText(number)}`);
      top.append(make("b", "", chunkName(number)));
      if (chunk.document !== null) top.append(make("span", "", `of ${chunk.document}`));
      top.append(make("span", "", many(chunk.stop - chunk.start, "token")), make("span", "", served(number)));
      if (chunk.attention !== null) top.append(make("span", "", `${(100 * chunk.attention).toFixed(1)} % of the attention`));
      block.append(top, tokens(chunk.start, chunk.stop));
      parts.push(block);
      row = chunk.stop;
    });
    text(fates.length);
    if (view.skipped.length) {
      parts.push(make("p", "note", `Left out, because these ids no longer exist: ${view.skipped.join(", ")}`));
    }
    at("prompt").replaceChildren(...parts);
  }

  /** Says in short where a chunk's KV came from. */
  function served(number) {
    const { start, stop } = view.chunks[number], kinds = [...new Set(fates.slice(start, stop))];
    if (kinds.length === 1) return sayFate(kinds[0]);
    const redone = fates.slice(start, stop).filter((fate) => fate === "recomputed").length;
    const rest = kinds.filter((fate) => fate !== "recomputed").map(sayFate).join(", ");
    return redone ? `${rest}; ${redone} recomputed` : rest;
  }

  /** Says what a chunk's KV was read behind: ids and a count, since the page has no text that was not in the prompt. */
  function chunkText(number) {
    const chunk = view.chunks[number], parts = [];
    if (!chunk.behind) parts.push("Its stored KV was read right behind the preamble.");
    else {
      const read = `Its stored KV was read behind ${many(chunk.behind, "token")}`;
      if (chunk.seen === null) parts.push(`${read}; of which chunks is no longer known.`);
      else if (!chunk.seen.length) parts.push(`${read} of a neutral passage.`);
      else {
        parts.push(`${read} of chunks: ` +
          `${chunk.seen.length > 12 ? `${chunk.seen.slice(0, 12).join(", ")} and ${chunk.seen.length - 12} more` : chunk.seen.join(", ")}.`);
      }
    }
    if (chunk.reason) parts.push(`Not served from stored KV: ${chunk.reason}.`);
    return parts.join(" ");
  }

  function point(row, number) {
    if (pointed) pointed.forEach((each) => each.classList.remove("at"));
    pointed = [];
    const lines = [];
    if (row !== null) {
      pointed.push(spans[row]);
      const line = make("div");
      line.append(`Token ${row.toLocaleString("en")} `, make("b", "", JSON.stringify(data.tokens[row])), `: ${sayFate(fates[row])}`);
      lines.push(line);
    }
    if (number !== null) {
      const block = at("prompt").querySelector(`[data-chunk="${number}"]`);
      pointed.push(block);
      const line = make("div"), chunk = view.chunks[number];
      line.append(make("b", "", chunkName(number)), chunk.document === null ? "" : ` of ${chunk.document}`,
        `, ${many(chunk.stop - chunk.start, "token")}. ${chunkText(number)}`);
      lines.push(line);
    }
    pointed.forEach((each) => each.classList.add("at"));
    at("detail-text").replaceChildren(...lines);
  }

  const rowOf = (target) => target.dataset && target.dataset.row !== undefined ? Number(target.dataset.row) : null;
  function pointAt(event) {
    const row = rowOf(event.target);
    if (row !== null) return point(row, chunkOf[row]);
    const block = event.target.closest && event.target.closest("[data-chunk]");
    if (block) point(null, Number(block.dataset.chunk));
  }
  let current = null;
  at("prompt").addEventListener("mouseover", pointAt);
  at("prompt").addEventListener("click", pointAt);
  at("prompt").addEventListener("focusin", (event) => {
    const block = event.target.closest("[data-chunk]");
    if (!block) return;
    current = null;
    point(null, Number(block.dataset.chunk));
  });
  at("prompt").addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const block = event.target.closest("[data-chunk]");
    if (!step || !block) return;
    const { start, stop } = view.chunks[Number(block.dataset.chunk)];
    current = current === null ? (step > 0 ? start : stop - 1) : Math.min(Math.max(current + step, start), stop - 1);
    point(current, Number(block.dataset.chunk));
    event.preventDefault();
  });

  function bar(track, from, to, end, name, title) {
    const made = make("div", `bar ${name}`);
    made.style.left = `${100 * Math.min(Math.max(from / end, 0), 1)}%`;
    made.style.width = `${100 * Math.min(Math.max((to - from) / end, 0), 1)}%`;
    made.title = title;
    track.append(made);
  }

  function attention() {
    const shares = view.chunks.map((chunk) => chunk.attention);
    const known = shares.some((share) => share !== null);
    at("attention-section").hidden = !known;
    if (!known) return;
    const rest = 1 - shares.reduce((sum, share) => sum + (share || 0), 0);
    const rows = [...shares.map((share, number) => [chunkName(number), share || 0]), ["other text", Math.max(rest, 0)]];
    const most = Math.max(...rows.map((each) => each[1]), 1e-9);
    at("attention").replaceChildren(...rows.map(([name, share]) => {
      const line = make("div", "meter"), track = make("span", "track");
      bar(track, 0, share, most, "", "");
      line.append(make("span", "", name), track, make("span", "", `${(100 * share).toFixed(1)} %`));
      return line;
    }));
  }

  function time() {
    const lanes = [], end = Math.max(1000 * view.figures.ttft_s, view.forward[1], 1e-6), [began, ended] = view.forward;
    const ms = (from, to) => seconds((to - from) / 1000);
    const lane = (name, bars, text) => {
      const line = make("div", "lane"), track = make("div", "track");
      bars.forEach(([from, to, kind, what]) => bar(track, from, to, end, kind, `${what}: ${ms(from, to)}, from ${seconds(from / 1000)}`));
      line.append(make("span", "", name), track);
      if (text) line.classList.add(text);
      lanes.push(line);
      return track;
    };
    const waits = (kind) => view.waits.filter(([what, from, to]) => what === kind && to - from >= 0.02);
    const firstWait = view.waits.length ? Math.min(...view.waits.map((wait) => wait[1])) : began;
    lane("Look-up", [[0, firstWait, "other", "tokenising the prompt and looking up its ids"]]);
    Object.entries(WAITS).forEach(([kind, [name, what]]) => {
      const found = waits(kind);
      if (found.length) lane(name, found.map(([, from, to]) => [from, to, { open: "load", encode: "", queue: "wait" }[kind], what]));
    });
    if (view.layers.length) {
      const first = view.layers[0];
      lane(`To layer ${first[0]}`, [[began, first[3], "", "masks, embedding, and everything before the first loaded layer"]]);
      view.layers.forEach(([layer, loadFrom, loadTo, asked, handed], number) => {
        const isLast = number + 1 === view.layers.length, next = isLast ? ended : view.layers[number + 1][3], bars = [];
        if (loadTo !== null) bars.push([loadFrom, loadTo, "load upper", `layer ${layer} loaded`]);
        bars.push([asked, handed, "wait lower", `waiting for layer ${layer}`], [handed, next, "lower", `layer ${layer} computed${isLast ? ", and everything up to the first token" : ""}`]);
        lane(`Layer ${layer}`, bars);
      });
    } else {
      lane("All layers", [[began, ended, "", "prefill of all layers"]]);
    }
    if (end - ended > 0.02 * end) lane("Batch", [[ended, end, "other", "the other prompts of the batch"]]);
    const axis = lane("", [], "axis");
    [0, 0.25, 0.5, 0.75].forEach((share) => {
      const mark = make("i", "", seconds(share * end / 1000));
      mark.style.left = `${100 * share}%`;
      axis.append(mark);
    });
    const lastMark = make("i", "", `first token ${seconds(end / 1000)}`);
    lastMark.style.right = "0";
    axis.append(lastMark);
    const keys = make("div", "keys");
    [["load", view.layers.length ? "loading" : ""], ["wait", "waiting"], ["", "computing"], ["other", "the rest"]].forEach(([kind, name]) => {
      if (!name) return;
      const item = make("span");
      item.append(make("span", `key bar ${kind}`), name);
      keys.append(item);
    });
    at("time").replaceChildren(keys, ...lanes);
    decode();
    at("time-note").textContent = view.layers.length
      ? "Upper half of a layer: loading it; lower half: computation from the arrival of its KV to the next layer. On a GPU, the time when work was submitted."
      : "No stored KV was loaded, so the layers are not shown separately.";
  }

  function decode() {
    if (view.times.length < 2) return;
    const gaps = view.times.slice(1).map((moment, number) => moment - view.times[number]), most = Math.max(...gaps, 1e-9);
    const all = gaps.reduce((sum, gap) => sum + gap, 0);
    const chart = make("div", "spark");
    chart.setAttribute("role", "img");
    chart.setAttribute("aria-label", "time of each token after the first");
    gaps.forEach((gap, number) => {
      const column = make("i");
      column.style.height = `${100 * gap / most}%`;
      column.title = `token ${number + 2}: ${seconds(gap / 1000)}`;
      chart.append(column);
    });
    at("time").append(chart, make("p", "note",
      `Then ${many(gaps.length, "token")} in ${seconds(all / 1000)}, ${seconds(all / gaps.length / 1000)} each, the slowest ${seconds(most / 1000)}.`));
  }

  if (data.views.length > 1) {
    ["This answer", "Full prefill"].forEach((name, index) => {
      const button = make("button", "", name);
      button.type = "button";
      button.addEventListener("click", () => show(index));
      at("switch").append(button);
    });
    at("switch").hidden = false;
  }
  show(0);
  document.documentElement.dataset.ready = "yes";
})();
