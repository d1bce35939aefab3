"""Importing this module is bastile.apply(): for programs that take the name of a module to import, as verl does for its
workers, by external_lib."""

import bastile

bastile.apply()
