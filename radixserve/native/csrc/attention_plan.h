// Who computes what in a step. A tile is a set of queries that read the same keys: consecutive queries of one row, or one query each of
// several rows whose pages are the same over the tile's blocks. Blocks lie at absolute positions, BLOCK tokens each.
//
//   tile      queries x [block_begin, block_end) of the keys of `row`
//   unit      what one thread does at a time: some KV heads of some blocks of a tile
//   partial   max, sum and weighted values of one query over one block. A tile that is the whole of its queries' work and is not cut
//             folds its partials as they come; any other leaves them in memory, and the query is merged afterwards, in block order.
#pragma once
#include <cstdint>
#include <vector>

namespace radixserve {

constexpr int BLOCK = 256;
constexpr int MAX_TILE_ROWS = 96;  // queries times query heads of one KV head, unless a single query has more
constexpr int MAX_GROUP_SIZE = 1024;  // query heads of one KV head
constexpr int MAX_NARROW_ROWS = 24;  // up to here memory is the limit, and a unit takes all heads of a token together

// a step, as attention/batch.py describes it; all arrays stay the caller's
struct Step {
    int num_rows, num_threads, page_size, group_size, num_kv_heads;
    bool is_shared_once;
    const int32_t *qo_indptr, *kv_indptr, *kv_indices, *seq_lens;
};

struct Tile {
    int row, block_begin, block_end;
    int first_query, num_queries;  // into Plan::tokens and Plan::positions
    int num_keys;                  // keys [0, num_keys) of the row are seen by any of the queries
    bool is_whole;                 // begins at block 0 and ends with its queries' last key
    int64_t partials;              // index of its first partial; -1: folds as it goes
};

struct Unit {
    int tile, kv_begin, kv_end, block_begin, block_end;
    float cost;
};

// partials of one query: `num_blocks` from each of its tiles, in order
struct Piece {
    int tile, query;
};
struct Merge {
    int token, first_piece, num_pieces;
};

struct Plan {
    std::vector<int> tokens, positions;
    std::vector<Tile> tiles;
    std::vector<Unit> units;
    std::vector<Piece> pieces;
    std::vector<Merge> merges;
    int64_t num_partials = 0;
    int num_shared_tiles = 0;
    int max_queries = 0;

    void make(const Step& step);

  private:
    void add_tile(int row, int block_begin, int block_end, const std::vector<int>& tokens, const std::vector<int>& positions);
    std::vector<Unit> cut(const Step& step, int tile, float wanted) const;
    void share(const Step& step, std::vector<int> rows, int block, int max_queries);
    void add_units(const Step& step);
    void add_merges();
};

}  // namespace radixserve
