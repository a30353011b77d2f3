// Values of a chart under the pointer, or by arrow keys.
function makeReadable(svg, chart) {
  const { frame, xs, ys, lines } = chart;
  const stops = [...new Set(lines.flatMap((line) => line.points.filter((p) => p[1] !== null).map((p) => p[0])))].sort((a, b) => a - b);
  if (!stops.length) return;
  const place = (x, y) => [
    frame.left + ((x - xs[0]) / (xs[1] - xs[0])) * (frame.right - frame.left),
    frame.bottom - ((y - ys[0]) / (ys[1] - ys[0])) * (frame.bottom - frame.top),
  ];
  const figure = svg.parentElement;
  let tip = null;
  let marks = null;
  let at = stops.length - 1;

  function hide() {
    tip?.remove();
    marks?.remove();
    tip = marks = null;
  }

  function show(index) {
    hide();
    at = clamp(index, 0, stops.length - 1);
    const x = stops[at];
    const [left] = place(x, ys[0]);
    marks = drawing('g', {}, drawing('line', { class: 'cursor', x1: left, x2: left, y1: frame.top, y2: frame.bottom }));
    tip = element('div', { class: 'tip', role: 'status' }, element('b', {}, `${chart.x.split(',')[0]} ${shown(x)}`));
    for (const line of lines) {
      const point = line.points.find((candidate) => candidate[0] === x && candidate[1] !== null);
      if (!point) continue;
      const [cx, cy] = place(...point);
      marks.append(drawing('circle', { class: `reading ${line.looks}`, cx, cy, r: 4 }));
      tip.append(element('div', {}, element('span', {}, line.name), element('b', {}, shown(point[1]))));
    }
    svg.append(marks);
    figure.append(tip);
    const scale = svg.clientWidth / frame.width;
    const free = figure.clientWidth - tip.offsetWidth;
    const beside = left * scale + 14;
    tip.style.left = `${clamp(beside > free ? left * scale - tip.offsetWidth - 14 : beside, 0, Math.max(0, free))}px`;
    tip.style.top = `${svg.offsetTop + 6}px`;
  }

  svg.addEventListener('pointermove', (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * frame.width;
    const value = xs[0] + ((x - frame.left) / (frame.right - frame.left)) * (xs[1] - xs[0]);
    let nearest = 0;
    stops.forEach((stop, index) => {
      if (Math.abs(stop - value) < Math.abs(stops[nearest] - value)) nearest = index;
    });
    show(nearest);
  });
  svg.addEventListener('pointerleave', hide);
  svg.addEventListener('blur', hide);
  svg.addEventListener('focus', () => { if (svg.matches(':focus-visible')) show(at); });
  svg.addEventListener('keydown', (event) => {
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: stops.length - 1 }[event.key];
    if (event.key === 'Escape') hide();
    if (to === undefined) return;
    event.preventDefault();
    show(to);
  });
}

for (const [id, chart] of Object.entries(data.charts)) {
  const svg = document.getElementById(id);
  if (svg) makeReadable(svg, chart);
}
