"""Names of branches: 64-bit, from the content, unique among what is alive, and not bounded by recursion."""

from __future__ import annotations

from builders import keys_path

from policies.cluster.blocks import Branch, ContentTree


def test_content_has_the_same_name_in_every_tree() -> None:
    def names(tree: ContentTree) -> list[int]:
        paths = [keys_path(tree, keys) for keys in ([1, 2, 3], [1, 2, 9, 9], [4])]
        return [branch.hash for path in paths for branch, _ in path.pieces]

    used = ContentTree(1, 1)
    kept = keys_path(used, [7, 7])
    assert names(used) == names(ContentTree(1, 1))
    assert kept.pieces[0][0].hash not in names(used)


def test_names_are_part_of_the_journal_and_stay() -> None:
    tree = ContentTree(64, 64)
    paths = [keys_path(tree, [1, 2, 3]), keys_path(tree, [1, 9])]
    assert [branch.hash for branch, _ in paths[1].pieces] == [13374452323046701812, 2250391212496651974]


def test_branches_of_one_parent_differ() -> None:
    tree = ContentTree(1, 1)
    paths = [keys_path(tree, keys) for keys in ([1, 2, 3], [1, 5], [1, 6], [1, 2, 6], [9])]
    branches = {branch for path in paths for branch, _ in path.pieces}
    assert len({branch.hash for branch in branches}) == len(branches) == 5


def test_private_branches_differ_although_they_have_no_content() -> None:
    tree = ContentTree(1, 1)
    mine, yours = tree.private(), tree.private()
    assert mine.hash != yours.hash
    assert not mine.shareable


def test_a_session_of_thousands_of_turns_has_a_name() -> None:
    branch = Branch(1, None, 0, 0, [1])
    for turn in range(2, 20_000):
        branch = Branch(turn, branch, turn, turn, [turn])
    name = branch.hash
    assert 0 <= name < 2**64
    assert branch.hash == name
