"""kill -9 at random moments of ingestions and upserts through a framework, whose nodes have random ids.

After each kill a process that has nothing in memory does the same again, and what is found of it is looked at: every node that
the vector store has must have its KV. Then all documents are deleted, of which no name, no KV and no file may be left.
"""

import json
import os
import random
import time
from functools import partial
from pathlib import Path

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine
from cacheblend_rag.store import check_store
from tests.core.documents.naive import small_model
from tests.families import tiny_tokenizer
from tests.limits import apart

DOCUMENTS, PIECES = 4, 6


def text_of(document: int, version: int) -> list[str]:
    """Return the pieces of a version of a document, half of which are those of the other versions."""
    chance = random.Random(document)
    pieces = [" ".join(f"t{chance.randrange(10, 90)}" for _ in range(30)) for _ in range(PIECES)]
    chance = random.Random(f"{document}:{version}")
    for number in range(1, PIECES, 2):
        pieces[number] = " ".join(f"t{chance.randrange(10, 90)}" for _ in range(30))
    return pieces


def open_engine(folder: Path) -> BlendEngine:
    settings = engine_settings(encode_batch_tokens=64, recompute_ratio=0.0, self_check=False)
    return BlendEngine(small_model(), tiny_tokenizer(), **settings, store=folder)


class Scene:
    """A folder with a KV store and a Chroma collection, and an index over both."""

    def __init__(self, folder: Path) -> None:
        import chromadb
        from llama_index.core import MockEmbedding, StorageContext, VectorStoreIndex
        from llama_index.vector_stores.chroma import ChromaVectorStore

        from llama_index_cacheblend import BlendVectorStore

        self.engine = open_engine(folder / "kv")
        self.collection = chromadb.PersistentClient(str(folder / "chroma")).get_or_create_collection("nodes")
        inner = ChromaVectorStore(chroma_collection=self.collection)
        self.index = VectorStoreIndex(
            [],
            storage_context=StorageContext.from_defaults(vector_store=BlendVectorStore(inner, engine=self.engine)),
            embed_model=MockEmbedding(8),
        )

    def ids(self) -> list[str]:
        """Return the ids that the vector store has."""
        return list(self.collection.get(include=[])["ids"])

    def upsert(self, version: int) -> None:
        """Bring all documents to a version, each by deleting and adding it."""
        from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode

        for document in range(DOCUMENTS):
            self.delete(document)
            start, nodes = 0, []
            for text in text_of(document, version):
                source = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=f"d{document}")}
                about = {"metadata": {"source": f"d{document}"}, "excluded_llm_metadata_keys": ["source"]}
                nodes.append(TextNode(text=text, start_char_idx=start, relationships=source, **about))
                start += len(text) + 1
            # As a document that is longer than a batch.
            self.index.insert_nodes(nodes[: PIECES // 2])
            self.index.insert_nodes(nodes[PIECES // 2 :])

    def delete(self, document: int) -> None:
        self.index.delete_ref_doc(f"d{document}")


def flaws(folder: Path, version: int) -> list[str]:
    """Do again what was killed, look at what there is, delete all documents, and return what was wrong."""
    scene = Scene(folder)
    scene.upsert(version)
    found, ids = [], scene.ids()
    if len(ids) != DOCUMENTS * PIECES:
        found.append(f"the vector store has {len(ids)} nodes")
    if sorted(ids) != sorted(scene.engine.ids()):
        found.append(f"it has {len(ids)} nodes, of which {len(set(ids) & set(scene.engine.ids()))} are among the names")
    lost = scene.engine.store.holds(ids).count(False)
    if lost:
        found.append(f"{lost} of {len(ids)} nodes have lost their KV")
    for document in range(DOCUMENTS):
        scene.delete(document)
    figures = scene.engine.store.stats()
    left = (len(scene.ids()), figures.nodes, figures.entries, figures.disk_bytes, figures.ram_bytes)
    scene.engine.close()
    files = [path.name for path in (folder / "kv" / "kv").rglob("*") if path.is_file()]
    if any(left) or files:
        found.append(f"nodes, names, entries, bytes on disk and in RAM that are left: {left}, files: {len(files)}")
    return found + check_store(folder / "kv").problems


def run(place: Path, kills: int) -> list[str]:
    """Go on until there were so many kills, beside a place; return what was wrong."""
    wrong: list[str] = []
    upsert_s = 0.5
    small_model()
    for number in range(kills):
        chance = random.Random(number)
        folder = place.with_name(f"{place.name}.{number}")
        folder.mkdir(parents=True)
        ready, begun = folder / "ready", time.monotonic()

        def work(folder: Path = folder, ready: Path = ready, is_upsert: bool = chance.random() < 0.6) -> None:
            scene = Scene(folder)
            if is_upsert:
                scene.upsert(0)
            ready.touch()
            scene.upsert(1)
            os.kill(os.getpid(), 9)

        child = apart(work)
        while not ready.exists() and not os.waitpid(child, os.WNOHANG)[0] and time.monotonic() - begun < 120:
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, upsert_s))
        os.kill(child, 9)
        os.waitpid(child, 0)
        _, status = os.waitpid(apart(partial(look, folder)), 0)
        found, upsert_s = json.loads((folder / "found").read_text()) if not status else (["nothing was found"], 0.5)
        wrong += [f"kill {number + 1}: {flaw}" for flaw in found]
    return wrong


def look(folder: Path) -> None:
    """Write what is wrong after a kill, and how long doing it again took."""
    begun = time.monotonic()
    found = flaws(folder, 1)
    (folder / "found").write_text(json.dumps([found, time.monotonic() - begun]))
