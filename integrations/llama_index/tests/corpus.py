"""Nodes and documents, always the same, with questions about them that the reference model can answer."""

import functools
from dataclasses import dataclass
from itertools import pairwise

from llama_index.core import Document
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode

from cacheblend_lab.reference.corpus import examples

__all__ = ["Asked", "Corpus", "corpus", "documents"]

NODES, QUESTIONS = 200, 30
# Of the questions about a context, those that are asked.
_PER_CONTEXT = 3


@dataclass(frozen=True)
class Asked:
    """A question, its answer (the value alone, and the sentence the model learnt to write), and the ids of the nodes it needs."""

    text: str
    answer: str
    sentence: str
    kind: str
    support: tuple[str, ...]


@dataclass(frozen=True)
class Corpus:
    nodes: tuple[TextNode, ...]
    questions: tuple[Asked, ...]

    def fresh_nodes(self) -> list[TextNode]:
        return [node.model_copy(deep=True) for node in self.nodes]


@functools.cache
def corpus() -> Corpus:
    """Return the corpus.

    It is made of held-out contexts of the reference model's world, of which no two speak of the same subject. Node ids are
    ``n000`` to ``n199``; the document that a node comes from (``ref_doc_id``) is named by its title, the subject's name, and a
    node's metadata say title and place in it, to us and not to the models.
    """
    nodes: list[TextNode] = []
    questions: list[Asked] = []
    for example in examples(160):
        names = [f"n{len(nodes) + number:03}" for number in range(len(example.chunks))]
        unused = iter(names)
        for document in example.documents:
            nodes += _chained([_node(next(unused), document.title, *each) for each in enumerate(document.chunks)])
        questions += [
            Asked(each.text, each.answer, each.sentence, each.kind, tuple(names[place] for place in each.support))
            for each in example.questions[:_PER_CONTEXT]
        ]
    del nodes[NODES:]
    nodes[-1].relationships.pop(NodeRelationship.NEXT, None)
    known = {node.node_id for node in nodes}
    answerable = [each for each in questions if known.issuperset(each.support)]
    return Corpus(tuple(nodes), tuple(answerable[:QUESTIONS]))


def documents(questions: int) -> list[tuple[Document, list[Asked]]]:
    """Return documents with questions about each, as many questions in all as were asked for.

    A document is what one held-out context of the reference model's world says, of three people and perhaps a company, a
    paragraph each. Its title, which no model is shown, is no other's; the questions do not say which nodes they need.
    """
    return [
        (
            Document(
                text="\n\n".join(" ".join(each.chunks) for each in example.documents),
                id_=f"d{number}",
                metadata={"title": f"{example.documents[0].title} and others"},
                excluded_llm_metadata_keys=["title"],
                excluded_embed_metadata_keys=["title"],
            ),
            [Asked(each.text, each.answer, each.sentence, each.kind, ()) for each in example.questions],
        )
        for number, example in enumerate(examples(questions))
    ]


def _node(node_id: str, title: str, place: int, text: str) -> TextNode:
    node = TextNode(
        id_=node_id,
        text=text,
        metadata={"title": title, "place": place},
        excluded_llm_metadata_keys=["title", "place"],
        excluded_embed_metadata_keys=["title", "place"],
    )
    node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=title)
    return node


def _chained(nodes: list[TextNode]) -> list[TextNode]:
    for one, other in pairwise(nodes):
        one.relationships[NodeRelationship.NEXT] = RelatedNodeInfo(node_id=other.node_id)
        other.relationships[NodeRelationship.PREVIOUS] = RelatedNodeInfo(node_id=one.node_id)
    return nodes
