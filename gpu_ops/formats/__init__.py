"""Types that calls take in addition to arrays, and file formats."""

import pkgutil

from gpu_ops.errors import suggest

suggest(globals(), [module.name for module in pkgutil.iter_modules(__path__)])
