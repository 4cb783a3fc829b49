export { Client, type ClientOptions, type GenerateRequest, type ResultOptions } from "./client.js";
export type { CallOptions } from "./connection.js";
export * from "./errors.js";
export { isEnd, type FollowOptions } from "./follow.js";
export type { Topic } from "./keys.js";
export { responseOf, type Response } from "./response.js";
export { Subscription, type SubscribeOptions, type TopicEvents } from "./subscribe.js";
export type * from "./types.js";
