"""Golden vectors V1 to V12 of the block hashes: block size 4 over tokens 0..15 unless a test says otherwise."""

from __future__ import annotations

from policies.cluster.hashing import (
    base_seed,
    chain_hashes,
    eagle_hashes,
    image_hash,
    local_hashes,
    placeholder_token,
)

TOKENS = list(range(16))
V1 = [9143094415614847814, 12124091508212882195, 1088361764653601668, 16024980976528976948]


def test_v1_local_hashes() -> None:
    assert local_hashes(TOKENS, 4) == V1


def test_v2_chain() -> None:
    assert chain_hashes(V1) == [
        9143094415614847814,
        9510318385840434533,
        16998148715716822651,
        16790386768269814709,
    ]


def test_v3_other_block_sizes() -> None:
    by_8 = local_hashes(TOKENS, 8)
    assert by_8 == [12126819726423666500, 9749165250595111323]
    assert chain_hashes(by_8)[1] == 12825646209309628853
    assert local_hashes(TOKENS, 16) == [15310707395893867146]


def test_v4_lora_seeds_the_local_hashes_and_not_the_chain() -> None:
    assert base_seed(lora="a") == 16629034431890740056
    local = local_hashes(TOKENS, 4, seed=base_seed(lora="a"))
    assert local == [5423431825673666632, 8531018594073694330, 3409518250959277156, 4329867074613467793]
    assert chain_hashes(local)[1:] == [13892989111688314051, 7247680781560397830, 14360685773755656440]


def test_v5_namespace() -> None:
    assert base_seed(namespace="a") == 15201566949650181209
    assert local_hashes(TOKENS, 4, seed=base_seed(namespace="a")) == [
        7746136578727202792,
        410000299558450569,
        14562122682669363052,
        1396472371961817645,
    ]


def test_v6_namespace_and_lora() -> None:
    seed = base_seed(lora="a", namespace="a")
    assert seed == 13383857307831368312
    assert local_hashes(TOKENS, 4, seed=seed) == [
        6462192549922672949,
        6147002992416210940,
        5276015814875105148,
        156213098920108793,
    ]


def test_v7_eagle_windows() -> None:
    assert eagle_hashes(range(17), 4) == [
        14562210786876287112,
        15916330181359808192,
        14047779161337223320,
        17321405262974595931,
    ]
    assert [len(eagle_hashes(range(n), 4)) for n in (0, 4, 5, 16, 17)] == [0, 0, 1, 3, 4]


def test_v8_images_in_blocks() -> None:
    local = local_hashes(TOKENS, 4, image_hashes={1: [0xDEADBEEF], 2: [7, 3]})
    assert local == [V1[0], 439460541833340312, 9210295884775999750, V1[3]]
    assert local == local_hashes(TOKENS, 4, image_hashes={1: [0xDEADBEEF], 2: [3, 7]})


def test_v9_repeated_and_largest_tokens() -> None:
    zeros = local_hashes([0] * 8, 4)
    assert zeros == [13277122834585657784] * 2
    assert chain_hashes(zeros)[1] == 5437929509326533641
    assert local_hashes([2**32 - 1] * 4, 4) == [12410542959481710713]


def test_v10_a_partial_block_has_no_hash() -> None:
    assert local_hashes(range(10), 4) == V1[:2]
    assert local_hashes(range(3), 4) == []
    assert local_hashes([], 4) == []


def test_v11_two_router_blocks_of_the_mismatch_case() -> None:
    local = local_hashes(range(1, 129), 64)
    assert local == [17732852320395450624, 16977986247603081716]
    assert chain_hashes(local)[1] == 1050256074108617503


def test_v12_image_ids_and_placeholders() -> None:
    assert placeholder_token(0xDEADBEEF) == 515703087
    assert image_hash("img-1") == 14770383865288705413
    assert image_hash("00112233445566778899aabbccddeeff" * 2) == 4822678189205111
