"""Sphinx's configuration. The pages are those that ``stage.py`` wrote."""

from pathlib import Path

import gpu_ops

HERE = Path(__file__).resolve().parent

project = "gpu_ops"
copyright = "gpu_ops contributors"
version = release = gpu_ops.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "scripts.docs.extension",
]
html_math_renderer = "mathml"
copybutton_prompt_text = (
    ">>> |\\.\\.\\. "  # of the examples in docstrings: copied without prompts and results
)
copybutton_prompt_is_regexp = True
copybutton_selector = "div:not(.output) > div.highlight > pre"
exclude_patterns: list[str] = []

myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3
myst_links_external_new_tab = False

autodoc_typehints = "none"  # docstrings give the types, with shapes
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
napoleon_google_docstring = False
napoleon_use_param = False  # types such as `array (..., cols)` are prose, not names to look up
napoleon_use_rtype = False
napoleon_custom_sections = ["Errors"]

html_theme = "furo"
html_title = f"gpu_ops {release}"
html_static_path = [str(HERE / "static")]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
pygments_style = "friendly"
pygments_dark_style = "native"
