"""From nodes to their places in documents, as LlamaIndex's own parsers make them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from llama_index.core import Document
from llama_index.core.node_parser import (
    MarkdownNodeParser,
    SentenceSplitter,
    TokenTextSplitter,
)
from llama_index.core.schema import (
    BaseNode,
    ImageNode,
    MediaResource,
    Node,
    NodeRelationship,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters

from cacheblend_rag.chunk import Chunk
from llama_index_cacheblend.nodes import Boundary, node_chunks, placed

TEXT = "# Crews\n\n" + " ".join(f"Crew {number} sails at {number} in the morning." for number in range(9))
TEXT += "\n\n## Ships\n\n" + " ".join(f"Ship {number} was built in Lisbon. " for number in range(9))


def document(name: str = "d", **options: Any) -> Document:
    return Document(text=TEXT, id_=name, **options)


def places(nodes: Sequence[BaseNode], *keys: str) -> list[Chunk]:
    chunks = node_chunks(nodes)
    followers = {node.next_node.node_id for node in nodes if node.next_node}
    return [placed(chunk, node, Boundary(keys), followers) for chunk, node in zip(chunks, nodes, strict=True)]


def body(chunk: Chunk) -> str:
    assert chunk.body is not None
    return chunk.text[slice(*chunk.body)]


@pytest.mark.parametrize("splitter", [SentenceSplitter, TokenTextSplitter])
@pytest.mark.parametrize("overlap", [0, 10])
@pytest.mark.parametrize("metadata", [{}, {"by": "Ada", "about": "Crew 1 sails at 1 in the morning."}])
def test_a_split_document_says_where_each_node_begins(splitter: Any, overlap: int, metadata: dict[str, str]) -> None:
    nodes = splitter(chunk_size=64, chunk_overlap=overlap)([document(metadata=metadata)])
    chunks = places(nodes)
    assert len(chunks) > 3
    assert {chunk.document for chunk in chunks} == {"d"}
    for chunk, node in zip(chunks, nodes, strict=True):
        assert body(chunk) == node.get_content().strip()
        assert chunk.body == (len(chunk.text) - len(body(chunk)), len(chunk.text))
        assert chunk.start is not None and TEXT.startswith(body(chunk), chunk.start)
    # Of the last one alone it cannot be known that it was the document that was split; it stands behind its predecessor.
    alone = [places([node])[0] for node in nodes]
    assert alone == [*chunks[:-1], replace(chunks[-1], start=None)]


def test_space_around_a_node_is_no_part_of_it() -> None:
    node = TextNode(text="\n  Otto paints. ", start_char_idx=7, metadata={"by": "Ada"})
    node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id="d")
    [chunk] = places([node])
    # Around the whole of it LlamaIndex takes it off; behind the metadata it stays.
    assert (chunk.text, chunk.start, body(chunk)) == ("by: Ada\n\n\n  Otto paints.", 10, "Otto paints.")


@pytest.mark.parametrize("template", ["{content}\n\n{metadata_str}", "<{metadata_str}>\n{content}\n</>", "{content}"])
def test_metadata_may_stand_anywhere(template: str) -> None:
    node = TextNode(text="Otto paints.", text_template=template, metadata={"by": "Ada", "summary": "Of a painter."})
    node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id="d")
    assert body(places([node])[0]) == "Otto paints."


def test_nodes_without_a_document_or_text_of_their_own_are_alone() -> None:
    source = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id="d")}
    changed = "{metadata_str} " + "of it"
    nodes = [
        TextNode(text="Otto paints."),
        Document(text="Otto paints."),
        ImageNode(text="", metadata={"by": "Ada"}, relationships=source),
        TextNode(text="Otto paints.", metadata={"by": "Ada"}, text_template=changed, relationships=source),
    ]
    assert [chunk.document for chunk in places(nodes)] == [None] * 4
    [whole] = places([Node(text_resource=MediaResource(text="Otto paints."), relationships=source)])
    assert (whole.document, whole.start, body(whole)) == ("d", None, "Otto paints.")


def test_what_was_split_twice_is_ordered_by_what_stands_before() -> None:
    sections = MarkdownNodeParser().get_nodes_from_documents([document()])
    nodes = SentenceSplitter(chunk_size=40, chunk_overlap=0)(sections)
    assert len(sections) == 2 and len(nodes) > 4
    chunks = places(nodes)
    assert {chunk.document for chunk in chunks} == {"d"}
    # Where they begin is counted from the beginning of their sections, and is not believed.
    assert any(node.start_char_idx != TEXT.find(node.get_content()) for node in nodes)
    assert [chunk.start for chunk in chunks] == [0] + [None] * (len(nodes) - 1)


def test_filters_inside_filters_are_seen(caplog: pytest.LogCaptureFixture) -> None:
    inside = MetadataFilters(filters=[MetadataFilter(key="page", value=1), MetadataFilter(key="reader", value="ada")])
    boundary = Boundary(["reader"])
    for _ in range(2):
        boundary.watch(MetadataFilters(filters=[inside, MetadataFilter(key="doc_id", value="d")]))
    [warning] = caplog.messages
    assert "filtered by 'page'" in warning


def test_nobodys_id_names_the_document_of_another_reader() -> None:
    def named(name: str, **metadata: str) -> str | None:
        node = TextNode(text="Otto paints.", metadata=metadata)
        node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=name)
        return Boundary(["reader"]).document(node)

    names = [named("d", reader="ada"), named('d", null, "ada'), named("d"), named("d", reader="null")]
    assert len(set(names)) == len(names)
