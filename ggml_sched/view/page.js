// The program of a page: fills the figures with what is open, and answers the pointer, the search and the tables.
//
// content.py makes the data of each plan, `tabs[k].plans[p]`, and says what times, bytes and ids in it mean.  A View is
// a tab; its plans share which layers are open, what is searched for, what is chosen.  Nothing here reads the network.
(function () {
  "use strict";
  const views = [];
  let data, colours;

  // -- data -----------------------------------------------------------------------------------------------------

  async function unpack(text) {
    const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).json();
  }

  const FEW = 120;                          // up to so many blocks of a plan, all layers are open at first
  const MANY = 20000;                       // if a map shows more blocks, none has an edge at any zoom
  const NUMBER = new Intl.NumberFormat("en-US");
  const number = n => NUMBER.format(n);

  function memory(n) {
    for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
      if (n >= size) return (n / size).toFixed(2) + " " + unit;
    return n + " B";
  }

  const safe = text => String(text).replace(/[&<>"]/g, c => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

  class Plan {
    constructor(raw) {
      Object.assign(this, raw);
      const t = this.tensors, n = t.name.length;
      this.count = n;
      this.inplace = new Set(t.inplace);
      this.held = new Set(t.held);
      this.outputs = new Set(t.output);
      this.fell = new Map();
      for (const entry of t.fell || []) for (const id of entry.slice(0, -1)) this.fell.set(id, entry[entry.length - 1]);
      this.blocks = new Map();              // owner -> [index of its map, indices of its blocks]
      this.maps.forEach((map, m) => map.owner.forEach((owner, k) => {
        if (!this.blocks.has(owner)) this.blocks.set(owner, [m, []]);
        this.blocks.get(owner)[1].push(k);
      }));
      this.sharing = new Map();             // owner -> ids of its views, and of results in place of it
      t.root.forEach((root, id) => {
        if (root >= 0 && !this.sharing.has(root)) this.sharing.set(root, []);
        if (root >= 0) this.sharing.get(root).push(id);
      });
    }
    word(column, id) { return this.words[this.tensors[column][id]]; }
    title(id) { return this.tensors.name[id] || this.word("op", id) + " (tensor " + id + ")"; }
    kind(id) { return this.word("op", id) + " · " + this.word("type", id) + " · " + this.word("shape", id); }
    owner(id) {
      const seen = new Set();
      while (this.tensors.root[id] >= 0 && !seen.has(id)) { seen.add(id); id = this.tensors.root[id]; }
      return id;
    }
    get readers() {                         // id -> ids of the tensors that read it
      if (!this._readers) {
        this._readers = new Map();
        this.tensors.sources.forEach((sources, id) => sources.forEach(s =>
          this._readers.has(s) ? this._readers.get(s).push(id) : this._readers.set(s, [id])));
      }
      return this._readers;
    }
    get keys() {                            // (name, op, how many tensors of both came before) -> id
      if (!this._keys) {
        const seen = new Map();
        this._keys = new Map();
        this._key = [];
        for (let id = 0; id < this.count; id++) {
          const key = this.tensors.name[id] + "\n" + this.tensors.op[id] + this.word("op", id);
          const before = seen.get(key) || 0;
          seen.set(key, before + 1);
          this._key[id] = this.tensors.name[id] + "\n" + this.word("op", id) + "\n" + before;
          this._keys.set(this._key[id], id);
        }
      }
      return this._keys;
    }
    layer(time) {
      const found = this.sections.find(([, first, stop]) => first <= time && time < stop);
      return found ? found[0] : "";
    }
    life(owner) {                           // the times [first, stop) in which the memory of an owner is taken
      const there = this.blocks.get(owner);
      if (!there) return null;
      const map = this.maps[there[0]];
      return [Math.min(...there[1].map(k => map.first[k])), Math.max(...there[1].map(k => map.stop[k]))];
    }
  }

  // -- figures --------------------------------------------------------------------------------------------------

  function model(name) {
    for (const doc of Bokeh.documents) {
      const found = doc.get_model_by_name(name);
      if (found) return found;
    }
    return null;
  }

  const quads = () => ({ left: [], right: [], bottom: [], top: [], fill: [], alpha: [] });

  function add(into, left, right, bottom, top, fill, alpha) {
    into.left.push(left); into.right.push(right); into.bottom.push(bottom); into.top.push(top);
    into.fill.push(fill); into.alpha.push(alpha);
  }

  class View {
    constructor(k, raw) {
      this.k = k;
      this.plans = raw.plans.map(plan => new Plan(plan));
      this.differences = raw.differences;
      this.root = document.querySelector(`[data-view="${k}"]`);
      this.open = new Set();                // labels of open layers, whose blocks are drawn
      if (this.plans.every(plan => plan.maps.reduce((sum, map) => sum + map.owner.length, 0) <= FEW))
        this.plans.forEach(plan => plan.sections.forEach(([label]) => this.open.add(label)));
      this.off = new Set();                 // roles that the legend has switched off
      this.hits = [];                       // for each plan the ids that are outlined
      this.chosen = null;                   // for each plan the chosen id, -1: it has none; null: nothing is chosen
      this.isShown = false;
      this.dressToolbar();
      this.root.querySelectorAll(".link").forEach(row => {
        row.tabIndex = 0;
        row.addEventListener("click", () => this.onRow(row));
        row.addEventListener("keydown", event => {
          if (event.key === "Enter" || event.key === " ") { event.preventDefault(); this.onRow(row); }
        });
      });
    }

    async show() {
      this.root.hidden = false;
      if (this.isShown) return;
      this.isShown = true;
      ggmlEmbeds[this.k]();
      while (!this.plans.every((_, p) => model(`${this.k}.${p}.strip`))) await new Promise(go => setTimeout(go, 5));
      this.figures().forEach(figure => this.wire(figure));
      this.plans.forEach((_, p) => this.join(p));
      this.paint();
      this.fillStrips();
      this.fill();
      this.describe();
    }

    figures() {
      return this.plans.flatMap((plan, p) => [model(`${this.k}.${p}.strip`),
        ...plan.maps.map(map => model(`${this.k}.${p}.map${map.backend}`))]);
    }

    wire(figure) {
      let due = 0;
      const later = () => { clearTimeout(due); due = setTimeout(() => this.refine(), 60); };
      figure.x_range.properties.start.change.connect(later);
      figure.x_range.properties.end.change.connect(later);
      figure.properties.inner_width.change.connect(later);
    }

    join(p) {                               // when plan p is zoomed or moved, let the other plans show the same layers
      const range = this.time(p);
      const follow = () => {
        if (this.isJoining) return;
        this.isJoining = true;
        this.plans.forEach((_, other) => {
          if (this.time(other) !== range)
            this.time(other).setv({ start: this.timeIn(p, other, range.start), end: this.timeIn(p, other, range.end) });
        });
        this.isJoining = false;
      };
      range.properties.start.change.connect(follow);
      range.properties.end.change.connect(follow);
    }

    time(p) { return model(`${this.k}.${p}.strip`).x_range; }

    timeIn(p, other, at) {                  // the time in plan `other` that is at the same part of the same layer
      const one = this.plans[p], two = this.plans[other];
      const isAlike = one.sections.length === two.sections.length
        && one.sections.every(([label], k) => label === two.sections[k][0]);
      const k = isAlike ? one.sections.findIndex(([, first, stop]) => first <= at && at < stop) : -1;
      if (k < 0) return at * two.end / one.end;
      const [, first, stop] = one.sections[k], [, begin, end] = two.sections[k];
      return begin + (at - first) / (stop - first) * (end - begin);
    }

    source(p, name) { return model(`${this.k}.${p}.${name}`); }

    isOpen(plan, section) { return section < 0 || this.open.has(plan.sections[section][0]) || plan.sections.length < 2; }

    alpha(role, alpha) { return this.off.has(role) ? alpha * 0.07 : alpha; }

    fill() {                                // draw cells for closed layers, blocks for open layers
      this.plans.forEach((plan, p) => {
        for (const map of plan.maps) {
          const cells = quads(), blocks = quads(), name = `map${map.backend}.`;
          for (const [section, low, high, role, part] of map.cells)
            if (!this.isOpen(plan, section)) {
              const [, first, stop] = plan.sections[section];
              add(cells, first, stop, low, high, data.colours[role], this.alpha(role, 0.28 + 0.62 * part));
            }
          map.shown = [];
          for (let k = 0; k < map.owner.length; k++)
            if (this.isOpen(plan, map.section[k])) {
              map.shown.push(k);
              add(blocks, map.first[k], map.stop[k], map.low[k], map.high[k], data.colours[map.role[k]],
                  this.alpha(map.role[k], 1));
            }
          this.source(p, name + "cells").data = cells;
          this.source(p, name + "blocks").data = { ...blocks, edge: blocks.left.map(() => 0) };
        }
      });
      this.fillHits();
      this.refine();
      const all = this.plans.every(plan => plan.sections.every(([label]) => this.open.has(label)));
      this.root.querySelectorAll(".modes button").forEach(button =>
        button.setAttribute("aria-pressed", button.dataset.mode === "tensors" ? all : this.open.size === 0));
    }

    fillStrips() {
      this.plans.forEach((plan, p) => {
        const lanes = plan.sections.length > 1 ? 1 : 0, layers = quads(), splits = quads();
        if (lanes)
          plan.sections.forEach(([label, first, stop], k) =>
            add(layers, first, stop, -0.88, -0.12, "#8a94a0", this.open.has(label) ? 0.45 : k % 2 ? 0.08 : 0.18));
        plan.splits.forEach(([b, first, stop]) => {
          const host = b === plan.backends.length - 1 && b > 0;
          add(splits, first, Math.max(stop, first + plan.end / 800), -b - lanes - 0.82, -b - lanes - 0.18,
              host ? colours.host : colours.device, 1);
        });
        const seen = new Set(), copies = { x: [], y0: [], y1: [], angle: [] };
        for (const [from, to, time] of plan.copies) {
          const key = from + " " + to + " " + time;
          if (from < 0 || from === to || seen.has(key)) continue;
          seen.add(key);
          const down = to > from ? -1 : 1;
          copies.x.push(time);
          copies.y0.push(-from - lanes - 0.5 + down * 0.32);
          copies.y1.push(-to - lanes - 0.5 - down * 0.42);
          copies.angle.push(down > 0 ? 0 : Math.PI);
        }
        this.source(p, "strip.layers").data = layers;
        this.source(p, "strip.splits").data = splits;
        this.source(p, "strip.copies").data = copies;
      });
    }

    fillHits() {
      this.plans.forEach((plan, p) => {
        const chosen = this.chosen && this.chosen[p] !== undefined && this.chosen[p] >= 0 ? [this.chosen[p]] : [];
        for (const [name, ids] of [["hits", this.hits[p] || []], ["chosen", chosen]]) {
          const owners = new Set(ids.map(id => plan.owner(id)));
          for (const map of plan.maps) {
            const found = quads();
            for (let k = 0; owners.size && k < map.owner.length; k++)
              if (owners.has(map.owner[k]))
                add(found, map.first[k], map.stop[k], map.low[k], map.high[k], "#e8117f", name === "hits" ? 0.15 : 0.12);
            this.source(p, `map${map.backend}.${name}`).data = found;
          }
        }
      });
    }

    refine() {                              // what depends on the zoom: bytes alive, numbers of layers, names in blocks
      this.plans.forEach((plan, p) => {
        const strip = model(`${this.k}.${p}.strip`), range = strip.x_range;
        const scale = (strip.inner_width || 0) / (range.end - range.start || 1);
        this.source(p, "strip.labels").data = this.numbers(plan, range, scale);
        for (const map of plan.maps) {
          const figure = model(`${this.k}.${p}.map${map.backend}`);
          const tall = (figure.inner_height || 0) / (figure.y_range.end - figure.y_range.start || 1);
          const labels = { x: [], y: [], text: [], colour: [] };
          for (const k of map.shown || []) {
            const first = Math.max(map.first[k], range.start), stop = Math.min(map.stop[k], range.end);
            if ((map.high[k] - map.low[k]) * tall < 13 || stop <= first) continue;
            const text = plan.title(map.owner[k]);
            if ((stop - first) * scale < 6.6 * text.length + 6 || this.off.has(map.role[k])) continue;
            labels.x.push((first + stop) / 2);
            labels.y.push((map.low[k] + map.high[k]) / 2);
            labels.text.push(text);
            labels.colour.push(data.deep.includes(map.role[k]) ? "#ffffff" : "#14181d");
            if (labels.x.length > 400) break;
          }
          this.source(p, `map${map.backend}.labels`).data = labels;
          this.edge(p, map, scale, tall);
          this.source(p, `map${map.backend}.curve`).data = this.envelope(map.curve, range, figure.inner_width || 1);
        }
      });
    }

    edge(p, map, scale, tall) {             // give edges to the blocks that are at least 3 pixels wide and tall
      const source = this.source(p, `map${map.backend}.blocks`), { left, right, bottom, top, edge } = source.data;
      if (left.length > MANY) return;
      const found = Array.from(left, (x, k) => (right[k] - x) * scale >= 3 && (top[k] - bottom[k]) * tall >= 3 ? 1 : 0);
      if (found.some((value, k) => value !== edge[k])) source.data = { ...source.data, edge: found };
    }

    numbers(plan, range, scale) {           // the labels of all layers, or of every second, fourth, ... to save room
      const words = { x: [], y: [], text: [] };
      if (plan.sections.length < 2) return words;
      const labels = plan.sections.map(([label]) => label.replace("part ", ""));
      const numbered = plan.sections.filter((_, k) => /^\d+$/.test(labels[k]));
      const least = Math.min(...numbered.map(([, first, stop]) => stop - first)) * scale;
      const room = 7 * Math.max(...labels.map(label => label.length)) + 5;
      let every = 1;
      while (least * every < room && every < labels.length) every *= 2;
      plan.sections.forEach(([, first, stop], k) => {
        const isNumber = /^\d+$/.test(labels[k]);
        if (stop < range.start || first > range.end) return;
        if (isNumber ? +labels[k] % every : (stop - first) * scale < room) return;
        words.x.push((Math.max(first, range.start) + Math.min(stop, range.end)) / 2);
        words.y.push(-0.5);
        words.text.push(labels[k]);
      });
      return words;
    }

    envelope([times, values], range, width) {   // bytes alive over time; if pixels are few, the most in every two
      let begin = 0, end = times.length;
      while (begin + 1 < times.length && times[begin + 1] <= range.start) begin++;
      while (end > begin + 1 && times[end - 1] > range.end) end--;
      if (end - begin < width) return { x: times.slice(begin, end + 1), y: values.slice(begin, end + 1) };
      const bins = Math.max(1, Math.round(width / 2)), x = [], y = [];
      let k = begin;
      for (let bin = 0; bin < bins; bin++) {
        const stop = range.start + (bin + 1) * (range.end - range.start) / bins;
        let most = values[k];
        while (k + 1 < end && times[k + 1] < stop) most = Math.max(most, values[++k]);
        x.push(range.start + bin * (range.end - range.start) / bins);
        y.push(times[begin] >= stop ? 0 : most);
      }
      return { x, y };
    }

    paint() {                               // set the colours of light or dark paper
      const font = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif";
      this.figures().forEach(figure => {
        figure.left.forEach(axis => axis.setv({ major_label_text_color: colours.pale, major_label_text_font: font,
          major_label_text_font_size: "12px" }));
        figure.center.filter(grid => grid.type === "Grid").forEach(grid => grid.setv({ grid_line_color: colours.grid }));
      });
      this.plans.forEach((plan, p) => {
        const at = `${this.k}.${p}.`;
        model(at + "strip.lines").glyph.setv({ line_color: colours.ink });
        model(at + "strip.tips").glyph.setv({ fill_color: colours.ink });
        model(at + "strip.text").glyph.setv({ text_color: colours.pale, text_font: font });
        for (const map of plan.maps) {
          const name = `${at}map${map.backend}.`;
          model(name + "arena").setv({ line_color: colours.ink });
          model(name + "live").setv({ line_color: colours.limit });
          model(name + "line").glyph.setv({ line_color: colours.ink });
          model(name + "back").setv({ fill_color: colours.back });
          for (const what of ["blocks", "cells"]) model(name + what + ".glyphs").glyph.setv({ line_color: colours.paper });
          model(name + "labels.text").glyph.setv({ text_font: font });
        }
      });
    }

    // -- the pointer --------------------------------------------------------------------------------------------

    under(p, figure, x, y) {                // what is at a point of a figure: {id}, {cell}, {split}, {section} or null
      const plan = this.plans[p];
      if (figure === "strip") {
        const lane = Math.floor(-y) - (plan.sections.length > 1 ? 1 : 0);
        const section = plan.sections.findIndex(([, first, stop]) => first <= x && x < stop);
        if (lane < 0) return section < 0 ? null : { section };
        const split = plan.splits.findIndex(([b, first, stop]) => b === lane && first <= x && x < stop);
        return split < 0 ? null : { split };
      }
      const map = plan.maps.find(one => "map" + one.backend === figure);
      let best = -1;
      for (const k of map.shown || [])
        if (map.first[k] <= x && x < map.stop[k] && map.low[k] <= y && y < map.high[k]) best = k;
      if (best >= 0) return { id: map.owner[best], map };
      const cell = map.cells.find(([section, low, high]) => low <= y && y < high && !this.isOpen(plan, section)
        && plan.sections[section][1] <= x && x < plan.sections[section][2]);
      return cell ? { cell, map } : null;
    }

    onMove(p, figure, event) {
      const found = this.under(p, figure, event.x, event.y);
      const tip = document.querySelector(".tip");
      tip.hidden = !found;
      if (!found) return;
      const plan = this.plans[p];
      tip.innerHTML = found.id !== undefined ? this.tipOf(plan, found.id, event.x)
        : found.cell ? this.tipOfCell(plan, found.map, found.cell)
        : found.split !== undefined ? this.tipOfSplit(plan, found.split) : this.tipOfLayer(plan, found.section);
      const box = this.boxOf(p, figure), x = box.left + event.sx, y = box.top + event.sy;
      tip.style.left = Math.max(4, Math.min(x + 16, innerWidth - tip.offsetWidth - 8)) + "px";
      tip.style.top = (y + 18 + tip.offsetHeight < innerHeight ? y + 18 : Math.max(4, y - tip.offsetHeight - 12)) + "px";
    }

    boxOf(p, figure) {
      const id = model(`${this.k}.${p}.${figure}`).id;
      return this.root.querySelector(`[data-root-id="${id}"]`).firstElementChild.getBoundingClientRect();
    }

    onTap(p, figure, event) {
      const plan = this.plans[p], found = this.under(p, figure, event.x, event.y);
      if (!found) return;
      if (found.id !== undefined) this.choose(p, found.id, false);
      else if (found.split !== undefined) this.zoom(p, plan.splits[found.split][1], plan.splits[found.split][2]);
      else this.toggle(plan.sections[found.section !== undefined ? found.section : found.cell[0]][0]);
    }

    toggle(label) {
      if (!this.open.delete(label)) this.open.add(label);
      this.fillStrips();
      this.fill();
    }

    zoom(p, first, stop) {
      const plan = this.plans[p], room = Math.max(2, (stop - first) * 0.15);
      this.time(p).setv({ start: Math.max(-0.02 * plan.end, first - room), end: Math.min(1.02 * plan.end, stop + room) });
    }

    onReset() {
      this.time(0).setv({ start: 0, end: this.plans[0].end });
    }

    // -- words --------------------------------------------------------------------------------------------------

    dot(role) { return `<i style="background:${data.colours[role]}"></i>`; }

    tipOf(plan, owner, x) {
      const t = plan.tensors, [first, stop] = plan.life(owner);
      const within = (plan.sharing.get(owner) || []).filter(id => plan.inplace.has(id));
      const now = within.filter(id => t.at[id] >= 0 && t.at[id] <= x).pop();
      const lines = [`${this.dot(t.role[owner])}<b>${safe(plan.title(owner))}</b>`,
        `<div>${safe(plan.kind(owner))}</div>`,
        `<div><b>${memory(t.bytes[owner])}</b> (${number(t.bytes[owner])} bytes)</div>`,
        `<div>alive during ${number(stop - first)} of ${number(plan.end)} steps, ${number(first)} to ${number(stop - 1)}`
          + `${plan.sections.length > 1 ? ", layer " + safe(plan.layer(first)) : ""}</div>`];
      if (now !== undefined) lines.push(`<div>here written in place: <b>${safe(plan.title(now))}</b></div>`);
      else if (within.length) lines.push(`<div>later written in place: ${safe(plan.title(within[0]))}`
        + `${within.length > 1 ? " and " + (within.length - 1) + " more" : ""}</div>`);
      const fell = plan.fell.get(owner);
      if (fell !== undefined) lines.push(`<div>fell back: ${safe(t.fallbacks[fell])}</div>`);
      else if (t.why[owner] >= 0) lines.push(`<div>here because ${safe(plan.words[t.why[owner]])}</div>`);
      return lines.join("");
    }

    tipOfCell(plan, map, [section, low, high, role, part, count, largest]) {
      const [label] = plan.sections[section], owner = map.owner[largest];
      return `${this.dot(role)}<b>layer ${safe(label)}</b>: ${safe(data.roles[role])}`
        + `<div>${memory(high - low)} taken during ${Math.round(100 * part)} % of the layer</div>`
        + `<div>${count} tensor${count > 1 ? "s" : ""}, the largest <b>${safe(plan.title(owner))}</b>, `
        + `${memory(plan.tensors.bytes[owner])}</div><div>click to open the layer</div>`;
    }

    tipOfSplit(plan, k) {
      const [b, first, stop, nodes] = plan.splits[k];
      const copies = plan.copies.filter(copy => copy[4] === k);
      const bytes = copies.reduce((sum, copy) => sum + plan.tensors.bytes[copy[3]], 0);
      return `<b>split ${k} on ${safe(plan.backends[b])}</b><div>${number(nodes)} nodes, steps ${number(first)} to `
        + `${number(stop - 1)}</div>` + (copies.length ? `<div>after ${copies.length} cop${copies.length > 1 ? "ies" : "y"}`
        + ` of ${memory(bytes)}: ${safe(copies.slice(0, 3).map(copy => plan.title(copy[3])).join(", "))}</div>` : "");
    }

    tipOfLayer(plan, k) {
      const [label, first, stop] = plan.sections[k];
      return `<b>${/^\d+$/.test(label) ? "layer " : ""}${safe(label)}</b><div>${number(stop - first)} steps</div>`
        + `<div>click to ${this.open.has(label) ? "close" : "open"} it</div>`;
    }

    link(p, id) { return `<a href="#" data-plan="${p}" data-id="${id}">${safe(this.plans[p].title(id))}</a>`; }

    follow(box) {                           // make a click on a link in this element choose its tensor
      box.querySelectorAll("a").forEach(a => a.addEventListener("click", event => {
        event.preventDefault();
        this.choose(+a.dataset.plan, +a.dataset.id, true);
      }));
    }

    links(p, ids) {
      const shown = ids.slice(0, 6).map(id => this.link(p, id)).join(", ");
      return shown + (ids.length > 6 ? ` and ${ids.length - 6} more` : "");
    }

    describe() {                            // fill the panel beside the maps with what is known of the chosen tensor
      const panel = this.root.querySelector(".details");
      if (!this.chosen) {
        panel.innerHTML = "<h3>Nothing chosen</h3><div class='kind'>Point at a block to see what it is, click it to keep "
          + "it here. Search finds tensors by name.</div>";
        return;
      }
      panel.innerHTML = this.plans.map((_, p) => this.chosen[p] >= 0 ? this.describeIn(p, this.chosen[p]) : "").join("");
      this.follow(panel);
    }

    describeIn(p, id) {
      const plan = this.plans[p], t = plan.tensors, owner = plan.owner(id), rows = [];
      const row = (title, words) => rows.push(`<dt>${title}</dt><dd>${words}</dd>`);
      row("size", `${memory(t.bytes[id])} <small>(${number(t.bytes[id])} bytes)</small>`);
      const b = t.backend[id];
      row("on", b < 0 ? "no backend: no node uses it" : safe(plan.backends[b]) + (t.split[id] >= 0 ? `, split ${t.split[id]}` : ""));
      if (t.at[id] >= 0) row("when", `step ${number(t.at[id])} of ${number(plan.end)}`
        + (plan.sections.length > 1 ? `, layer ${safe(plan.layer(t.at[id]))}` : ""));
      const there = plan.blocks.get(owner), life = plan.life(owner);
      if (plan.held.has(id)) row("memory", "of its own, outside the plan");
      else if (there) {
        const map = plan.maps[there[0]], k = there[1][0];
        row("memory", `${safe(plan.backends[map.backend])}, bytes ${number(map.low[k])} to ${number(map.high[there[1][there[1].length - 1]])}`);
        row("taken", `steps ${number(life[0])} to ${number(life[1] - 1)}`);
      }
      if (owner !== id) row(plan.inplace.has(id) ? "in place of" : "a view of", this.link(p, t.root[id]));
      const sharing = plan.sharing.get(id) || [];
      const inplace = sharing.filter(other => plan.inplace.has(other)), seen = sharing.filter(other => !plan.inplace.has(other));
      if (inplace.length) row("reused by", this.links(p, inplace));
      if (seen.length) row("viewed by", this.links(p, seen));
      if (t.why[id] >= 0) row("because", safe(plan.words[t.why[id]]));
      if (plan.fell.has(id)) row("fell back", safe(t.fallbacks[plan.fell.get(id)]));
      if (plan.outputs.has(id)) row("output", "its memory stays until the next compute");
      if (t.sources[id].length) row(this.plans[p].word("op", id) === "COPY" ? "copy of" : "reads", this.links(p, t.sources[id]));
      const readers = plan.readers.get(id) || [];
      if (readers.length) row("read by", this.links(p, readers));
      const name = this.plans.length > 1 ? `<div class="kind"><b>${safe(plan.name)}</b></div>` : "";
      return `<div class="${p ? "two" : ""}">${name}<h3>${this.dot(t.role[id])} ${safe(plan.title(id))}</h3>`
        + `<div class="kind">${safe(plan.kind(id))}</div><dl>${rows.join("")}</dl></div>`;
    }

    // -- choosing and searching ---------------------------------------------------------------------------------

    twin(p, id, other) {                    // the id in plan `other` of the same tensor as `id` in plan p; -1: none
      if (p === other) return id;
      this.plans[p].keys;
      const found = this.plans[other].keys.get(this.plans[p]._key[id]);
      return found === undefined ? -1 : found;
    }

    choose(p, id, zoomed) {
      this.chosen = this.plans.map((_, other) => this.twin(p, id, other));
      let opened = false;
      this.plans.forEach((plan, other) => {
        const there = this.chosen[other] >= 0 && plan.blocks.get(plan.owner(this.chosen[other]));
        if (!there) return;
        const section = plan.maps[there[0]].section[there[1][0]];
        if (section >= 0 && !this.isOpen(plan, section)) { this.open.add(plan.sections[section][0]); opened = true; }
      });
      const plan = this.plans[p], life = plan.life(plan.owner(id));
      if (zoomed && life) {
        const room = Math.max(6, 1.5 * (life[1] - life[0]));
        this.zoom(p, Math.max(0, life[0] - room), Math.min(plan.end, life[1] + room));
      }
      if (opened) { this.fillStrips(); this.fill(); } else { this.fillHits(); this.refine(); }
      this.describe();
    }

    search(text) {
      const words = text.trim().toLowerCase(), box = this.root.querySelector(".results");
      box.hidden = !words;
      this.hits = [];
      if (!words) { this.fillHits(); return []; }
      const found = [];
      this.plans.forEach((plan, p) => {
        this.hits[p] = [];
        for (let id = 0; id < plan.count; id++)
          if (plan.tensors.name[id].toLowerCase().includes(words) || plan.word("op", id).toLowerCase() === words) {
            this.hits[p].push(id);
            if (!p || this.twin(p, id, 0) < 0) found.push([p, id]);
          }
      });
      const isNamed = ([p, id]) => this.plans[p].tensors.name[id].toLowerCase() === words;
      found.sort((a, b) => isNamed(b) - isNamed(a)
        || this.plans[b[0]].tensors.bytes[b[1]] - this.plans[a[0]].tensors.bytes[a[1]]);
      box.innerHTML = `<p>${number(found.length)} found${found.length > 100 ? ", 100 of them, the largest first:" : ""}</p><ol>`
        + found.slice(0, 100).map(([p, id]) => `<li>${this.dot(this.plans[p].tensors.role[id])}${this.link(p, id)}`
          + `<span>${safe(this.plans[p].word("op", id))} ${memory(this.plans[p].tensors.bytes[id])}</span></li>`).join("") + "</ol>";
      this.follow(box);
      this.fillHits();
      return found;
    }

    clear() {
      this.hits = [];
      this.chosen = null;
      this.root.querySelector("input").value = "";
      this.root.querySelector(".results").hidden = true;
      this.root.querySelectorAll(".link.chosen").forEach(row => row.classList.remove("chosen"));
      this.fillHits();
      this.describe();
    }

    onRow(row) {                            // a click on a row of a table: outline its tensors, or end that
      const was = row.classList.contains("chosen"), p = +row.dataset.plan;
      this.clear();
      if (was) return;
      row.classList.add("chosen");
      if (row.dataset.split !== undefined) {
        const [, first, stop] = this.plans[p].splits[+row.dataset.split];
        this.zoom(p, first, stop);
      } else if (row.dataset.at !== undefined)
        this.showPeak(p, +row.dataset.map, +row.dataset.at);
      else if (row.dataset.series !== undefined)
        this.hits[p] = row.dataset.series.split(",").flatMap(k => this.plans[p].series[+k]);
      else if (row.dataset.fallback !== undefined)
        this.hits[p] = [...this.plans[p].fell].filter(([, k]) => k === +row.dataset.fallback).map(([id]) => id);
      else
        this.hits = this.plans.map((_, k) => this.differences[+row.dataset.difference].map(pair => pair[k]).filter(id => id >= 0));
      this.fillHits();
      this.root.querySelector(".columns").scrollIntoView({ block: "nearest" });
    }

    showPeak(p, b, time) {                  // outline what is alive at `time` in the arena of backend b, and zoom to it
      const plan = this.plans[p], map = plan.maps.find(found => found.backend === b);
      const section = plan.sections.find(([, first, stop]) => first <= time && time < stop);
      this.hits[p] = map.owner.filter((_, k) => map.first[k] <= time && time < map.stop[k]);
      if (section) this.open.add(section[0]);
      this.zoom(p, section ? section[1] : time - 10, section ? section[2] : time + 10);
      this.fillStrips();
      this.fill();
    }

    onKey(key) {                            // do what a key stands for; returns false for a key without a meaning
      const range = this.time(0), width = range.end - range.start;
      const [low, high] = range.bounds, middle = (range.start + range.end) / 2;
      const by = { ArrowLeft: -0.15, ArrowRight: 0.15 }[key], scale = { "+": 0.7, "-": 1 / 0.7 }[key];
      if (key === "/") this.root.querySelector("input").focus();
      else if (key === "0") this.onReset();
      else if (by) {
        const shift = Math.max(low - range.start, Math.min(high - range.end, by * width));
        range.setv({ start: range.start + shift, end: range.end + shift });
      } else if (scale && (scale > 1 || width > 4))
        range.setv({ start: Math.max(low, middle - scale * width / 2), end: Math.min(high, middle + scale * width / 2) });
      else return false;
      return true;
    }

    dressToolbar() {
      const bar = this.root.querySelector(".toolbar");
      new ResizeObserver(() => this.root.style.setProperty("--bar", bar.offsetHeight + "px")).observe(bar);
      const input = bar.querySelector("input");
      input.addEventListener("input", () => this.search(input.value));
      input.addEventListener("keydown", event => {
        if (event.key === "Enter") { const found = this.search(input.value); if (found.length) this.choose(...found[0], true); }
        if (event.key === "Escape") this.clear();
      });
      bar.querySelectorAll(".modes button").forEach(button => button.addEventListener("click", () => {
        this.open.clear();
        if (button.dataset.mode === "tensors")
          this.plans.forEach(plan => plan.sections.forEach(([label]) => this.open.add(label)));
        this.fillStrips();
        this.fill();
      }));
      bar.querySelector(".modes").hidden = this.plans.every(plan => plan.sections.length < 2);
      const roles = [...new Set(this.plans.flatMap(plan => plan.maps.flatMap(map => map.role)))].sort((a, b) => a - b);
      const legend = bar.querySelector(".legend");
      for (const role of roles) {
        const button = document.createElement("button");
        button.innerHTML = this.dot(role) + safe(data.roles[role]);
        button.setAttribute("aria-pressed", "true");
        button.addEventListener("click", () => {
          if (!this.off.delete(role)) this.off.add(role);
          button.setAttribute("aria-pressed", !this.off.has(role));
          this.fill();
        });
        legend.append(button);
      }
      legend.insertAdjacentHTML("beforeend", '<span><i style="border-color:var(--ink)"></i>arena</span>'
        + '<span><i style="border-color:var(--limit);border-top-style:dashed"></i>most bytes alive at once</span>'
        + '<span><i style="border-color:var(--ink);border-top-width:1px"></i>bytes alive</span>');
    }
  }

  // -- the page -------------------------------------------------------------------------------------------------

  window.ggmlView = {
    views,
    bytes: n => n ? memory(n).replace(/\.?0+ /, " ") : "0",
    on(what, name, event) {
      const [k, p, figure] = name.split(".");
      const view = views[+k];
      if (what === "move") view.onMove(+p, figure, event);
      else if (what === "tap") view.onTap(+p, figure, event);
      else if (what === "reset") view.onReset();
      else document.querySelector(".tip").hidden = true;
    },
  };

  async function start() {
    Bokeh.set_log_level("warn");
    data = await unpack(document.getElementById("packed").textContent);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    colours = dark.matches ? data.dark : data.light;
    data.tabs.forEach((raw, k) => views.push(new View(k, raw)));
    const buttons = document.querySelectorAll("nav button");
    const open = async k => {
      views.forEach((view, other) => { view.root.hidden = other !== k; });
      buttons.forEach((button, other) => button.setAttribute("aria-selected", other === k));
      await views[k].show();
    };
    buttons.forEach((button, k) => button.addEventListener("click", () => open(k)));
    dark.addEventListener("change", () => {
      colours = dark.matches ? data.dark : data.light;
      views.filter(view => view.isShown).forEach(view => { view.paint(); view.fillStrips(); });
    });
    document.addEventListener("keydown", event => {
      const view = views.find(one => one.isShown && !one.root.hidden);
      if (!view) return;
      if (event.key === "Escape") view.clear();
      else if (!event.target.closest("input") && !event.ctrlKey && !event.metaKey && !event.altKey && view.onKey(event.key))
        event.preventDefault();
    });
    await open(0);
    requestAnimationFrame(() => requestAnimationFrame(() => { document.documentElement.dataset.ready = "yes"; }));
  }

  start();
})();
