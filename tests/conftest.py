"""What all tests of the core may ask for."""

from tests.engines import engine as engine
from tests.engines import make_engine as make_engine
