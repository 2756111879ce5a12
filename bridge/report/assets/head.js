// Runs before the first paint: the stored theme, and the mark that scripts run at all.
(function () {
  var root = document.documentElement, theme = null;
  root.classList.add("js");
  try { theme = localStorage.getItem("bridge-theme"); } catch (error) { /* storage may be forbidden */ }
  if (theme === "light" || theme === "dark") root.dataset.theme = theme;
})();
