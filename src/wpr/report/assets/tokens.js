// The token view: a response token by token under both penalties, and what lies behind the chosen token.
const SPACE = '␣';
const PENALTIES = ['kl', 'wpr'];

// A token's text where it stands alone: the spaces and line ends in it made visible.
function word(text) {
  const marked = text.replace(/^ +| +$/g, (spaces) => SPACE.repeat(spaces.length)).replace(/\n/g, '⏎').replace(/\t/g, '⇥');
  const parts = marked.split(/([␣⏎⇥]+)/).filter((part) => part);
  return parts.length ? parts.map((part) => (/^[␣⏎⇥]/.test(part) ? element('span', { class: 'space' }, part) : part)) : ['(nothing)'];
}

const plain = (text, most = 16) => {
  const short = text === '(all other tokens)' ? '(all others)' : text.replace(/^ +/, SPACE).replace(/\n/g, '⏎');
  return short.length > most ? `${short.slice(0, most - 1)}…` : short || '(nothing)';
};

const share = (value) => (value === null ? '–' : `${shown(100 * value, 3)}%`);

// The largest penalties would hide all others: full colour from the 95th percentile on.
function strongest(tokens, name) {
  const sizes = tokens.map((token) => Math.abs(token[name] ?? 0)).sort((a, b) => a - b);
  return sizes[Math.floor(0.95 * (sizes.length - 1))] || sizes[sizes.length - 1] || 1;
}

class TokenView {
  constructor(box, studies) {
    this.box = box;
    this.studies = studies;
    this.shownPenalties = 'both';
    this.choose = element('select', { 'aria-label': 'Response', on: { change: () => this.open(Number(this.choose.value)) } });
    for (const policy of new Set(studies.map((study) => study.policy))) {
      const group = element('optgroup', { label: policy });
      studies.forEach((study, index) => {
        if (study.policy !== policy) return;
        const text = study.prompt.trim().replace(/\s+/g, ' ');
        group.append(element('option', { value: index }, `${policy} · ${text.length > 60 ? `…${text.slice(-60)}` : text}`));
      });
      this.choose.append(group);
    }
    this.toggles = [['both', 'Both'], ['kl', 'KL'], ['wpr', 'WPR']].map(([value, label]) =>
      element('button', { type: 'button', 'data-penalty': value, on: { click: () => this.show(value) } }, label));
    this.body = element('div');
    this.inspector = element('div');
    box.replaceChildren(
      element('div', { class: 'controls' }, this.choose, element('span', { role: 'group', 'aria-label': 'Coloured by', class: 'controls inner' }, ...this.toggles)),
      this.body,
      this.inspector,
    );
    this.open(Number(box.dataset.first || 0));
  }

  // Another response; its most telling token, by mass moved or by penalty, is opened at once.
  open(index) {
    this.study = this.studies[index];
    const { tokens } = this.study;
    this.choose.value = String(index);
    this.body.replaceChildren(
      element('div', { class: 'prompt' }, this.study.prompt.replace(/^\n+|\n+$/g, '')),
      element('p', { class: 'facts' },
        element('span', {}, element('b', {}, 'policy'), ` ${this.study.policy}`),
        element('span', {}, element('b', {}, 'score'), ` ${shown(this.study.score)}`),
        this.study.gold === null ? null : element('span', {}, element('b', {}, 'gold'), ` ${shown(this.study.gold)}`),
        this.study.settings ? element('span', {}, this.study.settings) : null,
        this.study.cut ? element('span', {}, `${this.study.cut} more tokens are not shown`) : null),
      element('div', { class: 'strips' }, PENALTIES.map((name) => this.strip(name))),
    );
    const telling = (token) => (token.moved ?? 0) * 1e3 + Math.abs(token.wpr ?? token.kl ?? 0);
    let best = 0;
    tokens.forEach((token, number) => { if (telling(token) > telling(tokens[best])) best = number; });
    this.show(this.shownPenalties);
    this.select(best);
  }

  strip(name) {
    const { tokens, names } = this.study;
    const most = strongest(tokens, name);
    const list = element('div', { class: 'tokens', role: 'listbox', 'aria-label': `Tokens coloured by ${names[name]}`, 'aria-orientation': 'horizontal' });
    tokens.forEach((token, number) => {
      const value = token[name];
      const line = /\n/.test(token.text);
      const option = element('span', {
        class: 'token', role: 'option', tabindex: -1, 'data-number': number, 'aria-selected': 'false',
        'aria-label': `${token.text.trim() || plain(token.text)}, penalty ${shown(value)}`,
        title: `${names[name]} ${shown(value)}`,
      }, line ? token.text.replace(/\n/g, '⏎\n') : token.text || '∅');
      if (value !== null) {
        const colour = value >= 0 ? 'discouraged' : 'encouraged';
        option.style.backgroundColor = `rgb(var(--${colour}) / calc(var(--strength) * ${clamp(Math.abs(value) / most, 0, 1).toFixed(3)}))`;
      }
      // Space before a word belongs to its token, but colour that hangs over the end of a line helps nobody.
      const [space] = token.text.trim() ? /^ */.exec(token.text) : [''];
      if (space) option.textContent = option.textContent.slice(space.length);
      list.append(space, option);
    });
    list.addEventListener('click', (event) => {
      const option = event.target.closest('.token');
      if (option) this.select(Number(option.dataset.number), option);
    });
    list.addEventListener('keydown', (event) => this.key(event, list));
    return element('div', { class: 'strip', 'data-penalty': name },
      element('h3', {}, names[name]),
      list,
      element('p', { class: 'scale' }, element('span', {}, shown(-most, 2)), element('i'), element('span', {}, `+${shown(most, 2)}`), element('span', {}, 'penalty')));
  }

  key(event, list) {
    const options = [...list.children];
    const at = options.indexOf(event.target.closest('.token'));
    if (at < 0) return;
    if (event.key === 'Enter' || event.key === ' ') {
      event.preventDefault();
      this.select(at, options[at]);
      return;
    }
    if (event.key === 'Escape') {
      this.close();
      return;
    }
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: options.length - 1,
      ArrowDown: this.vertical(options, at, 1), ArrowUp: this.vertical(options, at, -1) }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const next = options[clamp(to, 0, options.length - 1)];
    // An open panel follows, a closed one stays closed until Enter.
    if (this.inspector.firstChild) this.select(Number(next.dataset.number), next);
    else this.reach(next);
  }

  // The token in the line below or above that is nearest to this one.
  vertical(options, at, way) {
    const here = options[at].getBoundingClientRect();
    let best = at;
    let distance = Infinity;
    options.forEach((option, index) => {
      const there = option.getBoundingClientRect();
      const lines = ((there.top - here.top) * way) / here.height;
      if (lines < 0.5) return;
      const far = lines * 1e4 + Math.abs(there.left - here.left);
      if (far < distance) [best, distance] = [index, far];
    });
    return best;
  }

  // One token of each strip is reached by Tab: the one that was last used.
  reach(option) {
    for (const other of option.parentElement.children) other.tabIndex = -1;
    option.tabIndex = 0;
    option.focus();
  }

  select(number, option = null) {
    for (const list of this.body.querySelectorAll('.tokens')) {
      [...list.children].forEach((other, index) => {
        other.setAttribute('aria-selected', String(index === number));
        other.tabIndex = index === number ? 0 : -1;
      });
    }
    if (option) option.focus();
    this.inspector.replaceChildren(inspect(this.study, number, () => this.close()));
  }

  close() {
    this.inspector.replaceChildren();
    const chosen = this.body.querySelector('.strip:not([hidden]) [aria-selected="true"]');
    chosen?.focus();
  }

  show(value) {
    this.shownPenalties = value;
    for (const button of this.toggles) button.setAttribute('aria-pressed', String(button.dataset.penalty === value));
    for (const strip of this.body.querySelectorAll('.strip')) strip.hidden = value !== 'both' && strip.dataset.penalty !== value;
  }
}

function inspect(study, number, close) {
  const token = study.tokens[number];
  const fact = (name, value) => element('span', {}, element('b', {}, name), ` ${value}`);
  return element('div', { class: `inspector ${study.looks}`, role: 'region', 'aria-label': 'The chosen token', 'data-number': number },
    element('header', {},
      element('h3', {}, 'Token ', element('q', {}, ...word(token.text)), ` (${number + 1} of ${study.tokens.length})`),
      element('button', { type: 'button', on: { click: close } }, 'Close')),
    element('p', { class: 'facts', role: 'status' },
      fact(`${study.names.kl} penalty`, shown(token.kl)), fact(`${study.names.wpr} penalty`, shown(token.wpr)),
      fact('policy', share(token.policy)), fact('SFT', share(token.reference))),
    element('div', { class: 'looks' }, distributions(token), plan(token), nearest(token)));
}

function distributions(token) {
  const most = Math.max(1e-9, ...token.candidates.map(([, ours, theirs]) => Math.max(ours ?? 0, theirs ?? 0)));
  const rows = token.candidates.flatMap(([text, ours, theirs]) => [
    element('span', { class: text === token.text ? 'word chosen' : 'word' }, ...word(text)),
    drawing('svg', { 'aria-hidden': 'true' },
      drawing('rect', { class: 'ours', x: 0, y: 0, height: 8, width: `${((100 * (ours ?? 0)) / most).toFixed(2)}%` }),
      drawing('rect', { class: 'theirs', x: 0, y: 9, height: 8, width: `${((100 * (theirs ?? 0)) / most).toFixed(2)}%` })),
    element('span', { class: 'values' }, share(ours), element('br'), share(theirs)),
  ]);
  return element('div', { class: 'distributions' },
    element('h4', {}, 'What could have come here'),
    element('p', { class: 'note keys' }, element('span', {}, element('i', { class: 'key' }), 'policy'), element('span', { class: 'neutral' }, element('i', { class: 'key' }), 'SFT'), element('span', {}, 'probability of the next token')),
    rows.length ? element('div', { class: 'pairs' }, ...rows) : element('p', { class: 'note' }, 'Not recorded.'));
}

function plan(token) {
  const unmatched = [[token.unmatched_policy, 'of the policy'], [token.unmatched_reference, 'of the SFT model']].filter(([mass]) => mass !== null);
  const told = token.moved === null ? '' : `${share(token.moved)} of the probability moved between different tokens`;
  const left = unmatched.length ? `${told ? '; ' : ''}unmatched: ${unmatched.map(([mass, whose]) => `${share(mass)} ${whose}`).join(', ')}` : '';
  if (!token.plan.length) return element('div', { class: 'plan' }, element('h4', {}, 'Transport plan'), element('p', { class: 'note' }, 'Not recorded.'));
  const rows = token.plan.map(([from, to, mass, cost]) => element('tr', {},
    element('th', { scope: 'row' }, ...word(from)), element('td', {}, ...(from === to ? ['stays'] : word(to))),
    element('td', { class: 'n' }, share(mass)), element('td', { class: 'n' }, shown(cost, 3))));
  return element('div', { class: 'plan' },
    element('h4', {}, 'Transport plan'),
    element('p', { class: 'note' }, `${told}${left}.`),
    flow(token.plan),
    element('details', {}, element('summary', {}, `Table of ${rows.length} moves`),
      element('table', {},
        element('thead', {}, element('tr', {}, ...['from', 'to', 'mass', 'cost'].map((name) => element('th', { scope: 'col' }, name)))),
        element('tbody', {}, ...rows))));
}

// Mass on the left is the policy's, on the right the SFT model's; a band is as thick as the mass it carries.
function flow(moves) {
  const known = moves.filter(([, , mass]) => mass > 0);
  const column = (side) => {
    const sums = new Map();
    for (const move of known) sums.set(move[side], (sums.get(move[side]) ?? 0) + move[2]);
    return [...sums].map(([text, mass]) => ({ text, mass, used: 0 }));
  };
  const sides = [column(0), column(1)];
  // The right side keeps the order of the left, so that what stays runs straight.
  const order = new Map(sides[0].map((node, index) => [node.text, index]));
  sides[1].sort((a, b) => (order.get(a.text) ?? 99) - (order.get(b.text) ?? 99));
  const total = Math.max(...sides.map((side) => side.reduce((sum, node) => sum + node.mass, 0)), 1e-9);
  const tall = 150;
  const gap = 17;
  const top = 22;
  for (const side of sides) {
    let y = top;
    for (const node of side) {
      node.y = y;
      node.height = Math.max(2, (node.mass / total) * tall);
      y += Math.max(node.height, 2) + gap;
    }
    side.end = y;
  }
  const svg = drawing('svg', { class: 'flow', viewBox: `0 0 360 ${Math.max(sides[0].end, sides[1].end)}`, role: 'img', 'aria-label': 'Transport plan; the table below has the same numbers' },
    drawing('text', { class: 'head', x: 104, y: 12, 'text-anchor': 'end' }, 'policy'),
    drawing('text', { class: 'head', x: 256, y: 12 }, 'SFT'));
  const [left, right] = [112, 248];
  const middle = (left + right) / 2;
  const bands = known.map(([from, to, mass, cost]) => ({
    a: sides[0].find((node) => node.text === from), b: sides[1].find((node) => node.text === to), mass, cost, stays: from === to,
  }));
  // At either end bands leave in the order in which they arrive at the other, so that none crosses without need.
  bands.sort((one, other) => one.b.y - other.b.y);
  for (const band of bands) [band.y0, band.h0] = take(band.a, band.mass);
  bands.sort((one, other) => one.a.y - other.a.y);
  for (const band of bands) [band.y1, band.h1] = take(band.b, band.mass);
  bands.sort((one, other) => other.stays - one.stays);
  for (const { a, b, mass, cost, stays, y0, h0, y1, h1 } of bands) {
    const d = `M${left} ${y0}C${middle} ${y0} ${middle} ${y1} ${right} ${y1}V${y1 + h1}C${middle} ${y1 + h1} ${middle} ${y0 + h0} ${left} ${y0 + h0}Z`;
    const told = `${plain(a.text)} → ${plain(b.text)}: ${share(mass)}, cost ${shown(cost, 3)}`;
    svg.append(drawing('path', { class: stays ? 'stays' : 'moves', d }, drawing('title', {}, told)));
  }
  sides.forEach((side, index) => {
    for (const node of side) {
      svg.append(
        drawing('rect', { class: index ? 'to' : 'from', x: index ? right : left - 4, y: node.y, width: 4, height: node.height }),
        drawing('text', { x: index ? 256 : 104, y: node.y + node.height / 2 + 4, 'text-anchor': index ? 'start' : 'end' }, plain(node.text)));
    }
  });
  return svg;
}

// The next free part of a token's bar, as much of it as the mass is of the token's: where it begins, and its height.
function take(node, mass) {
  const height = (mass / node.mass) * node.height;
  node.used += height;
  return [node.y + node.used - height, height];
}

function nearest(token) {
  if (!token.nearest.length) return null;
  const rows = token.nearest.map(([text, distance, ours, theirs]) => element('tr', {},
    element('th', { scope: 'row' }, ...word(text)), element('td', { class: 'n' }, shown(distance, 3)),
    element('td', { class: 'n' }, share(ours)), element('td', { class: 'n' }, share(theirs))));
  return element('div', { class: 'nearest' },
    element('h4', {}, 'Nearest tokens'),
    element('p', { class: 'note' }, 'By the distance of their embeddings, in units of the median distance of a token to its nearest.'),
    element('table', {},
      element('thead', {}, element('tr', {}, ...['token', 'distance', 'policy', 'SFT'].map((name) => element('th', { scope: 'col' }, name)))),
      element('tbody', {}, ...rows)));
}

const tokenBox = document.getElementById('token-view');
if (tokenBox && data.studies.length) {
  const view = new TokenView(tokenBox, data.studies);
  // Words elsewhere on the page that open their token here.
  for (const link of document.querySelectorAll('a[data-study]')) {
    link.addEventListener('click', (event) => {
      event.preventDefault();
      location.hash = link.hash; // so that the browser's way back leads back to the word
      view.open(Number(link.dataset.study));
      const number = Number(link.dataset.token);
      view.select(number, view.body.querySelector(`.strip:not([hidden]) [data-number="${number}"]`));
    });
  }
}
