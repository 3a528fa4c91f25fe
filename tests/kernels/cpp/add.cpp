// The smallest library: a number is added.

extern "C" void te_add(int* x) { *x += ADDED; }
