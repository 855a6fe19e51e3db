"""The command in this process, on a tiny model's folder."""

from tests.cli.conftest import documents as documents
from tests.cli.conftest import model_folder as model_folder
from tests.cli.conftest import run as run
from tests.limits import one_thread as one_thread
