// Elements built from text, never from HTML: what a run's files hold stays text.
const data = JSON.parse(document.getElementById('data').textContent);
const SVG = 'http://www.w3.org/2000/svg';

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === 'on') for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

const element = (name, attributes = {}, ...children) => build(document.createElement(name), attributes, children);
const drawing = (name, attributes = {}, ...children) => build(document.createElementNS(SVG, name), attributes, children);

// A number to read: a few digits and a real minus sign, as the tables have it.
function shown(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return '–';
  const size = Math.abs(value);
  const whole = Number.isInteger(value) || size >= 1000;
  const text = size !== 0 && (size < 1e-4 || size >= 1e9) ? value.toExponential(1) : whole ? value.toFixed(0) : String(Number(value.toPrecision(digits)));
  return text.replace('e+', 'e').replace(/-/g, '−');
}

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

// The section that is read is marked in the list of sections.
const links = new Map([...document.querySelectorAll('nav a')].map((link) => [link.hash.slice(1), link]));
if ('IntersectionObserver' in window) {
  const watch = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      for (const link of links.values()) link.classList.remove('here');
      links.get(entry.target.id)?.classList.add('here');
    }
  }, { rootMargin: '-15% 0px -75% 0px' });
  for (const section of document.querySelectorAll('main > section')) watch.observe(section);
}
