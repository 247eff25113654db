// What the theme leaves to the site: the search dialog has a name, boxes that scroll are reached by the keyboard,
// and the buttons beside a block of code are no landmarks of the page.
function mend() {
  document.querySelector(".md-search").ariaLabel = "Search";
  for (const buttons of document.querySelectorAll("nav.md-code__nav")) buttons.role = "presentation";
  const boxes = "pre > code, .md-typeset__scrollwrap, .md-typeset__table, div.formula, div.shown";
  for (const box of document.querySelectorAll(boxes)) {
    const { overflowX, overflowY } = getComputedStyle(box);
    const scrolls = (overflow, more) => more > 0 && ["auto", "scroll"].includes(overflow);
    if (scrolls(overflowX, box.scrollWidth - box.clientWidth) || scrolls(overflowY, box.scrollHeight - box.clientHeight)) {
      box.tabIndex = 0;
    }
  }
}

mend();
addEventListener("load", mend);
addEventListener("resize", mend);
new MutationObserver(mend).observe(document.body, { childList: true, subtree: true });
