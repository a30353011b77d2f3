"""Sphinx's settings for the documentation site; `make docs` builds it into build/site.

The pages are plain Markdown that reads well on a code host too. What is particular to the site is in `extension`: the
order of the pages, the reference, which is made of docstrings, settings and help texts at every build, and checks.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from wpr import __version__  # noqa: E402 (this checkout's)

project = "wpr"
version = release = __version__
copyright = "the authors of wpr, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "docs.extension"]
root_doc = "index"
exclude_patterns = ["extension"]
highlight_language = "none"
smartquotes = False  # --option is one

myst_heading_anchors = 4
myst_enable_extensions = []
suppress_warnings = ["myst.xref_ambiguous"]

default_role = "py:obj"
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "special-members": "__call__", "show-inheritance": True}
maximum_signature_line_length = 80
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
add_module_names = False

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = f"wpr {__version__}"
html_show_sphinx = False
html_copy_source = False
html_show_search_summary = False  # a browser cannot read other files of a site that it has from a disk
html_static_path = ["extension/static"]
html_css_files = ["site.css"]
html_theme_options = {
    "top_of_page_buttons": [],
    "light_css_variables": {"font-stack": "system-ui, sans-serif"},
    "dark_css_variables": {"font-stack": "system-ui, sans-serif"},
}
