// One token of rules that carry a state: each state is read once and written once, which is what takes the time.
//
// What a query reads of the new state, S' = decay S + k u^T, is known before that is written: decay q S + (q k) u.

#include "attention_units.h"

namespace te_models {

constexpr int kTogether = kLanes / 2;  // vectors of columns whose sums are in registers

struct Step {
  const float *q, *k, *v, *decays, *state;  // of a head; decays: of each channel of keys; state: [K][V], or null
  float beta, scale;
  bool corrects;
  float *out, *after;
  int64_t K, V_;
};

template <int vectors>
void columns(const Step& s, int64_t first) {
  Floats read[vectors], old[vectors], u[vectors];
  for (int i = 0; i < vectors; ++i) read[i] = old[i] = zero();
  float own = 0.0f;
  for (int64_t c = 0; c < s.K; ++c) own += s.q[c] * s.k[c];
  if (s.state != nullptr)
    for (int64_t c = 0; c < s.K; ++c) {
      const Floats query = all(s.q[c] * s.decays[c]), key = all(s.k[c] * s.decays[c]);
#pragma GCC unroll 8
      for (int i = 0; i < vectors; ++i) {
        const Floats x = load(s.state + c * s.V_ + first + i * kLanes);
        read[i] = fma(query, x, read[i]);
        old[i] = fma(key, x, old[i]);
      }
    }
  for (int i = 0; i < vectors; ++i) {
    const Floats value = load(s.v + first + i * kLanes);
    u[i] = s.corrects ? mul(all(s.beta), sub(value, old[i])) : value;
    store(s.out + first + i * kLanes, mul(all(s.scale), fma(all(own), u[i], read[i])));
  }
  for (int64_t c = 0; c < s.K; ++c) {
    const Floats decay = all(s.decays[c]), key = all(s.k[c]);
#pragma GCC unroll 8
    for (int i = 0; i < vectors; ++i) {
      const int64_t at = c * s.V_ + first + i * kLanes;
      const Floats written = mul(key, u[i]);
      store(s.after + at, s.state == nullptr ? written : fma(decay, load(s.state + at), written));
    }
  }
}

}  // namespace te_models
using namespace te_models;

// q, k: [B, H / shared, K]; v, out: [B, H, V]; decays: exponentials, [B, H], or with `by_channel` [B, H, K]; beta: [B,
// H], or null where a token writes v itself; state: [B, H, K, V], or null; V: a multiple of 16
extern "C" void te_delta_step(const float* q, const float* k, const float* v, const float* decays, const float* beta,
                              const float* state, float* out, float* after, int64_t B, int64_t H, int64_t shared,
                              int64_t K, int64_t values, int by_channel, float scale, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < B * H; ++i) {
    const int64_t of_keys = i / shared * K, of_state = i * K * values;
    std::vector<float> own(by_channel ? 0 : K, by_channel ? 0.0f : decays[i]);
    const Step s{q + of_keys,
                 k + of_keys,
                 v + i * values,
                 by_channel ? decays + i * K : own.data(),
                 state == nullptr ? nullptr : state + of_state,
                 beta == nullptr ? 0.0f : beta[i],
                 scale,
                 beta != nullptr,
                 out + i * values,
                 after + of_state,
                 K,
                 values};
    int64_t c = 0;
    for (; c + kTogether * kLanes <= values; c += kTogether * kLanes) columns<kTogether>(s, c);
    for (; c < values; c += kLanes) columns<1>(s, c);
  }
}

// x, y: [B, H, P]; dt: [B, H]; A: [H]; keys and queries (B and C): [B, H / shared, N]; D: [H] or null; state: [B, H, P,
// N], or null; N: a multiple of 16
extern "C" void te_space_step(const float* x, const float* dt, const float* A, const float* keys, const float* queries,
                              const float* D, const float* state, float* y, float* after, int64_t B, int64_t H,
                              int64_t shared, int64_t P, int64_t N, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < B * H; ++i) {
    const float *const key = keys + i / shared * N, *const query = queries + i / shared * N;
    const float decay = std::exp(dt[i] * A[i % H]), direct = D == nullptr ? 0.0f : D[i % H];
    for (int64_t p = i * P; p < (i + 1) * P; ++p) {
      const Floats written = all(dt[i] * x[p]);
      Floats read = zero();
      for (int64_t n = 0; n < N; n += kLanes) {
        Floats next = mul(written, load(key + n));
        if (state != nullptr) next = fma(all(decay), load(state + p * N + n), next);
        store(after + p * N + n, next);
        read = fma(next, load(query + n), read);
      }
      y[p] = sum(read) + direct * x[p];
    }
  }
}
