// The turns of protocol.py around the steps of llm.c's train_gpt2.c, on random tokens: llmc_gpt WEIGHTS ROWS CONTEXT
#define TESTING  // leaves its main function out
#include "train_gpt2.c"

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

static float step(GPT2* model, int* tokens, int rows, int context, int number) {
    for (int i = 0; i < 2 * rows * context; ++i) tokens[i] = rand() % model->config.vocab_size;
    gpt2_forward(model, tokens, tokens + rows * context, rows, context);
    gpt2_zero_grad(model);
    gpt2_backward(model);
    gpt2_update(model, 1e-3f, 0.9f, 0.99f, 1e-8f, 0.1f, number);
    return model->mean_loss;
}

int main(int count, char** given) {
    const int rows = atoi(given[2]), context = atoi(given[3]), warm = atoi(given[4]);
    int number = 0, steps;
    GPT2 model;
    gpt2_build_from_checkpoint(&model, given[1]);
    int* tokens = mallocCheck(2 * rows * context * sizeof(int));
    const double start = now();
    float* losses = mallocCheck(warm * sizeof(float));
    for (int i = 0; i < warm; ++i) losses[i] = step(&model, tokens, rows, context, ++number);  // it prints meanwhile
    printf("{\"ready\": \"llm.c\", \"losses\": [");
    for (int i = 0; i < warm; ++i) printf(i ? ", %f" : "%f", losses[i]);
    printf("], \"first_s\": %f}\n", now() - start);
    fflush(stdout);
    while (scanf("%d", &steps) == 1) {
        printf("{\"times\": [");
        for (int i = 0; i < steps; ++i) {
            const double before = now();
            step(&model, tokens, rows, context, ++number);
            printf(i ? ", %f" : "%f", now() - before);
        }
        printf("]}\n");
        fflush(stdout);
    }
    return count == 0;
}
