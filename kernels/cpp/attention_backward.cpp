// Flash attention's backward pass (arXiv 2205.14135, 2307.08691).
//
// Of a tile of queries and a block of keys the scores are computed again, and with the log of each query's sum of
// exponentials they are probabilities P at once. With dP, the product of the result's gradient and the values, and
// delta, each query's sum of its result times its gradient, the gradient of scores is dS = P (dP - delta), and
//
//     dV += P^T dO,    dK += dS^T Q,    dQ += dS K.
//
// Of soft-capped scores c tanh(s / c) (Gemma 2, arXiv 2408.00118) dS has one more factor, their derivative 1 - tanh^2.
//
// The gradients of keys and values are sums over all queries of all heads that share them. Tiles are dealt out to a
// number of parts that follows from the shape alone. Each part adds up its own tiles one after the other, and then the
// parts are added in their order, so that no bit depends on the number of threads.

#include "attention_tiles.h"

namespace te_models {

constexpr int kBroad = kLanes / 4;  // vectors of a product with four rows
constexpr int64_t kParts = 16;      // of all key heads together, at least, where there are enough tiles

struct Backward {
  Sizes s;
  const X *grad, *q, *k, *v, *out;
  const float* logsumexp;
  Strides grad_at, q_at, k_at, v_at, out_at, sum_at, dq_at, dk_at, dv_at;
  X *dq, *dk, *dv;
  Scale scale;
};

// What a thread holds of a tile: panels of its queries and gradients, across and down, and scores with a block of keys.
struct Scratch {
  Buffer queries, grads, queries_down, grads_down, probabilities, gradients, pairs, scores, dq;
  explicit Scratch(const Sizes& s)
      : queries(buffer(kTileLanes * s.channels / kDeep)), grads(buffer(kTileLanes * s.values / kDeep)),
        queries_down(buffer(kTileLanes * s.channels / kDeep)), grads_down(buffer(kTileLanes * s.values / kDeep)),
        probabilities(buffer(kTileLanes * kKeys)), gradients(buffer(kTileLanes * kKeys)),
        pairs(buffer(kTileLanes * kKeys)), scores(buffer(kTileLanes * kKeys)), dq(buffer(kTileLanes * s.channels)) {}
};

// The rows of a tile's queries -> panels of columns [values / kLanes][lanes / kDeep][kLanes].
inline void pack_tile_down(const X* data, const Strides& strides, const Sizes& s, int64_t batch, int64_t group,
                           const Tile& tile, int64_t lanes, int64_t values, float* to) {
  static const X nothing[256] = {};
  for (int64_t i = 0; i < lanes; i += kDeep) {
    const X* rows[2];
    for (int64_t n = 0; n < 2; ++n)
      rows[n] = i + n < tile.count ? row_of(data, strides, s, batch, group, tile.begin + i + n) : nothing;
    pack_down(rows[0], rows[1], values, lanes / kDeep, i / kDeep, to);
  }
}

// sums [rows][values] += rows [rows][lanes / kDeep] of units times panels of columns [values / kLanes][lanes / kDeep]
template <int broad>
INLINE inline void add_columns(const float* weights, int64_t deep, const float* panels, int64_t rows, int64_t values,
                               int64_t from, float* sums) {
  for (int64_t r = 0; r < rows; r += 4) {
    Floats s[4][broad];
    float* const place = sums + r * values + from;
    for (int i = 0; i < 4; ++i)
      for (int v = 0; v < broad; ++v) s[i][v] = load(place + i * values + v * kLanes);
    multiply(weights + r * deep, deep, 1, panels + from * deep, deep * kLanes, kLanes, deep, s);
    for (int i = 0; i < 4; ++i)
      for (int v = 0; v < broad; ++v) store(place + i * values + v * kLanes, s[i][v]);
  }
}

inline void add_all_columns(const float* weights, int64_t deep, const float* panels, int64_t rows, int64_t values,
                            float* sums) {
  int64_t from = 0;
  for (; from + kBroad * kLanes <= values; from += kBroad * kLanes)
    add_columns<kBroad>(weights, deep, panels, rows, values, from, sums);
  for (; from < values; from += kLanes) add_columns<1>(weights, deep, panels, rows, values, from, sums);
}

// What a tile gives to the gradients of the keys and values of its head, dk [keys][channels] and dv [keys][values], and
// the gradient of its queries.
template <int vectors>
void differentiate(const Backward& b, int64_t batch, int64_t group, const Tile& tile, const float* keys,
                   const float* keys_down, const float* values, int64_t all_deep, Scratch& t, float* dk, float* dv) {
  const Sizes& s = b.s;
  constexpr int64_t lanes = vectors * kLanes;
  const int64_t of_channels = s.channels / kDeep, of_values = s.values / kDeep;
  pack_tile(b.q, b.q_at, s, batch, group, tile, s.channels, t.queries.get());
  pack_tile(b.grad, b.grad_at, s, batch, group, tile, s.values, t.grads.get());
  pack_tile_down(b.q, b.q_at, s, batch, group, tile, lanes, s.channels, t.queries_down.get());
  pack_tile_down(b.grad, b.grad_at, s, batch, group, tile, lanes, s.values, t.grads_down.get());
  float sums[lanes], deltas[lanes];
  for (int64_t i = 0; i < lanes; ++i) {
    sums[i] = -kInfinity, deltas[i] = 0.0f;  // of lanes without a query all probabilities are zero
    if (i >= tile.count) continue;
    sums[i] = -kLog2E * *row_of(b.logsumexp, b.sum_at, s, batch, group, tile.begin + i);
    const X* const grad = row_of(b.grad, b.grad_at, s, batch, group, tile.begin + i);
    const X* const out = row_of(b.out, b.out_at, s, batch, group, tile.begin + i);
    Floats total = zero();
    for (int64_t c = 0; c < s.values; c += kLanes) total = fma(widened(grad + c), widened(out + c), total);
    deltas[i] = sum(total);
  }
  Floats base[vectors], delta[vectors], ones[vectors];
  for (int v = 0; v < vectors; ++v)
    base[v] = load(sums + v * kLanes), delta[v] = load(deltas + v * kLanes), ones[v] = all(1.0f);
  const Floats scale = all(b.scale.of_power);
  const bool capped = b.scale.of_cap != 0.0f;
  for (int64_t begin = tile.first; begin < tile.end; begin += kKeys) {
    const int64_t rows = up_to(std::min(kKeys, tile.end - begin), kTall);
    Floats largest[vectors];
    for (int v = 0; v < vectors; ++v) largest[v] = zero();
    scores_of<vectors>(tile, t.queries.get(), keys, begin, rows, of_channels, b.scale.of_cap, t.scores.get(), largest);
    for (int64_t r = 0; r < rows; r += kTall) {
      Floats dp[kTall][vectors];
      for (int i = 0; i < kTall; ++i)
        for (int v = 0; v < vectors; ++v) dp[i][v] = zero();
      const int64_t key = begin + r;
      multiply(values + key / kLanes * (of_values * kLanes) + key % kLanes, 1, kLanes, t.grads.get(),
               of_values * kLanes, kLanes, of_values, dp);
#pragma GCC unroll 8
      for (int i = 0; i < kTall; i += kDeep)
        for (int v = 0; v < vectors; ++v) {
          Floats ds[2];
#pragma GCC unroll 2
          for (int n = 0; n < kDeep; ++n) {
            const int64_t place = (r + i + n) * vectors + v;
            const Floats score = load(t.scores.get() + place * kLanes), p = exp2(fma(score, scale, base[v]));
            ds[n] = mul(p, sub(dp[i + n][v], delta[v]));
            if (capped) {  // of a masked one, minus infinity, it is zero as its probability is
              const Floats ratio = larger(all(-1.0f), score);
              ds[n] = mul(ds[n], sub(all(1.0f), mul(ratio, ratio)));
            }
            store_values(t.probabilities.get() + place * (kLanes / kDeep), p);
            store_values(t.gradients.get() + place * (kLanes / kDeep), ds[n]);
          }
          if constexpr (kPairs) store(t.pairs.get() + ((r + i) / 2 * vectors + v) * kLanes, paired(ds[0], ds[1]));
        }
    }
    add_rows<vectors>(keys_down + begin / kDeep * kLanes, all_deep, kPairs ? t.pairs.get() : t.gradients.get(),
                      rows / kDeep, s.channels, ones, begin == tile.first, t.dq.get());
    add_all_columns(t.probabilities.get(), lanes / kDeep, t.grads_down.get(), rows, s.values, dv + begin * s.values);
    add_all_columns(t.gradients.get(), lanes / kDeep, t.queries_down.get(), rows, s.channels, dk + begin * s.channels);
  }
  X* to[lanes];
  float factors[lanes];
  for (int64_t i = 0; i < tile.count; ++i) {
    to[i] = row_of(b.dq, b.dq_at, s, batch, group, tile.begin + i);
    factors[i] = b.scale.scale;
  }
  unpack_tile(t.dq.get(), to, tile.count, s.channels, vectors, factors);
}

// Row `key` of a gradient: the parts [parts][keys][values], each `apart` from the next one, in their order.
inline void write_row(const float* sums, int64_t parts, int64_t apart, int64_t key, int64_t values, float scale,
                      X* to) {
  for (int64_t c = 0; c < values; c += kLanes) {
    Floats total = load(sums + key * values + c);
    for (int64_t p = 1; p < parts; ++p) total = add(total, load(sums + p * apart + key * values + c));
    write(to + c, mul(total, all(scale)));
  }
}

void backward(const Backward& b, int threads) {
  const Sizes& s = b.s;
  const int64_t panels = (s.keys + kLanes - 1) / kLanes, padded = panels * kLanes, deep = padded / kDeep;
  const int64_t of_keys = padded * (s.channels / kDeep), of_values = padded * (s.values / kDeep);
  const int64_t of_head = 2 * of_keys + of_values, apart = padded * (s.channels + s.values);
  const int64_t tiles = (s.rows() + kTileLanes - 1) / kTileLanes, pairs = s.batch * s.groups;
  const int64_t parts = std::max<int64_t>(1, std::min((kParts + pairs - 1) / pairs, tiles / 4));
  const int64_t together = std::min<int64_t>((threads + parts - 1) / parts, pairs);
  const Buffer packed = buffer(together * of_head), sums = buffer(together * parts * apart);
  for (int64_t first = 0; first < pairs; first += together) {  // key heads, as many as keep the threads busy
    const int64_t some = std::min(together, pairs - first);
#pragma omp parallel num_threads(threads)
    {
      Scratch scratch(s);
#pragma omp for
      for (int64_t i = 0; i < some * panels; ++i) {
        const int64_t batch = (first + i / panels) / s.groups, group = (first + i / panels) % s.groups;
        const X* const k = b.k + batch * b.k_at.batch + group * b.k_at.head;
        const X* const v = b.v + batch * b.v_at.batch + group * b.v_at.head;
        float* const to = packed.get() + i / panels * of_head;
        pack_keys_across(k, b.k_at.position, s.keys, i % panels, s.channels, to);
        pack_keys_down(k, b.k_at.position, s.keys, i % panels, s.channels, deep, to + of_keys);
        pack_keys_across(v, b.v_at.position, s.keys, i % panels, s.values, to + 2 * of_keys);
      }
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < some * parts; ++i) {
        const int64_t pair = first + i / parts;
        const float* const keys = packed.get() + i / parts * of_head;
        float* const dk = sums.get() + i * apart;
        std::fill(dk, dk + apart, 0.0f);
        for (int64_t n = i % parts; n < tiles; n += parts) {
          const Tile tile(s, n * kTileLanes, std::min<int64_t>(kTileLanes, s.rows() - n * kTileLanes));
          by_vectors(tile.count, [&](auto vectors) {
            differentiate<decltype(vectors)::value>(b, pair / s.groups, pair % s.groups, tile, keys, keys + of_keys,
                                                    keys + 2 * of_keys, deep, scratch, dk, dk + padded * s.channels);
          });
        }
      }
#pragma omp for
      for (int64_t i = 0; i < some * s.keys; ++i) {
        const int64_t own = i / s.keys, key = i % s.keys, batch = (first + own) / s.groups;
        const int64_t group = (first + own) % s.groups;
        const float* const dk = sums.get() + own * parts * apart;
        write_row(dk, parts, apart, key, s.channels, b.scale.scale,
                  b.dk + batch * b.dk_at.batch + key * b.dk_at.position + group * b.dk_at.head);
        write_row(dk + padded * s.channels, parts, apart, key, s.values, 1.0f,
                  b.dv + batch * b.dv_at.batch + key * b.dv_at.position + group * b.dv_at.head);
      }
    }
  }
}

}  // namespace te_models
using namespace te_models;

// sizes: see `Sizes`; strides: of grad, q, k, v, out, logsumexp, dq,
// dk and dv: see `Strides`
extern "C" void te_flash_backward(const X* grad, const X* q, const X* k, const X* v, const X* out,
                                  const float* logsumexp, X* dq, X* dk, X* dv, const int64_t* sizes,
                                  const int64_t* strides, float scale, float softcap, int threads) {
  Backward b;
  std::memcpy(&b.s, sizes, sizeof(Sizes));
  std::memcpy(&b.grad_at, strides, 9 * sizeof(Strides));
  b.grad = grad, b.q = q, b.k = k, b.v = v, b.out = out, b.logsumexp = logsumexp;
  b.dq = dq, b.dk = dk, b.dv = dv;
  b.scale = Scale(scale, softcap);
  backward(b, threads);
}
