// Prompts a few at a time; without this script all are shown after each other.
const A_PAGE = 2;

function pageExchanges(box) {
  const exchanges = [...box.children];
  if (exchanges.length <= A_PAGE) return;
  let first = 0;
  const told = element('span', { role: 'status' });
  const back = element('button', { type: 'button', on: { click: () => show(first - A_PAGE) } }, 'Previous');
  const on = element('button', { type: 'button', on: { click: () => show(first + A_PAGE) } }, 'Next');
  const choose = element('select', { 'aria-label': 'Go to a prompt', on: { change: () => show(Number(choose.value)) } });
  exchanges.forEach((exchange, index) => {
    const text = exchange.querySelector('.prompt').textContent.trim().replace(/\s+/g, ' ');
    choose.append(element('option', { value: index }, `${index + 1}. ${text.length > 90 ? `${text.slice(0, 90)}…` : text}`));
  });

  function show(index) {
    first = clamp(index - (index % A_PAGE), 0, exchanges.length - 1);
    exchanges.forEach((exchange, number) => { exchange.hidden = number < first || number >= first + A_PAGE; });
    told.textContent = `${first + 1} to ${Math.min(exchanges.length, first + A_PAGE)} of ${exchanges.length} prompts`;
    back.disabled = first === 0;
    on.disabled = first + A_PAGE >= exchanges.length;
    if (Number(choose.value) < first || Number(choose.value) >= first + A_PAGE) choose.value = String(first);
  }

  box.before(element('div', { class: 'controls' }, back, on, choose, told));
  show(0);
}

const exchangeBox = document.getElementById('exchanges');
if (exchangeBox) pageExchanges(exchangeBox);
